"""Hardware, collectives, arithmetic, memory, and the prediction of a layout from them."""
