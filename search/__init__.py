"""The space of layouts, the presets, the proposer, and where a study is kept."""
