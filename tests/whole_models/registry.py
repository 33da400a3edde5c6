"""Every whole model by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.whole_models.convolutions import resnet, unet
from tests.whole_models.decoding import kv_cache_decoding
from tests.whole_models.mixture_of_experts import moe_one_hot, moe_sorted
from tests.whole_models.model import WholeModel
from tests.whole_models.other_architectures import graph_network, recommender, state_space
from tests.whole_models.transformers import diffusion, encoder_decoder, gpt2, llama, vit

MODELS: Mapping[str, Callable[[], WholeModel]] = {
    make.__name__: make
    for make in (
        gpt2, llama, moe_one_hot, moe_sorted, vit, resnet, unet, state_space, graph_network, recommender, diffusion,
        encoder_decoder, kv_cache_decoding,
    )
}  # fmt: skip
