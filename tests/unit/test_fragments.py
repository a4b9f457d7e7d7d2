"""Fragments: whole blocks of real architectures, each parameter in one of them, and the shards of one fragment."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_diloco.errors import ConfigError
from hf_diloco.inner.base import PlainShards
from hf_diloco.inner.fragments import FragmentShards, cut_into_fragments, describe_fragments
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import AlignedPartition, check_cover
from tests.programs.shards_pieces import Cut, make_shards

Order = Literal["strided", "sequential"]
ORDERS = get_args(Order)
Sizes = dict[str, int]

# the longest lists of modules, in the model's order, with their lengths
STACKS = {
    "bart": [("model.encoder.layers", 2), ("model.decoder.layers", 3)],
    "bloom": [("transformer.h", 4)],
    "falcon": [("transformer.h", 4)],
    "gemma2": [("model.layers", 4)],
    "gpt2": [("transformer.h", 4)],
    "gpt_neox": [("gpt_neox.layers", 4)],
    "llama": [("model.layers", 4)],
    "mamba": [("backbone.layers", 4)],
    "mistral": [("model.layers", 4)],
    "mixtral": [("model.layers", 4)],
    "opt": [("model.decoder.layers", 4)],
    "phi": [("model.layers", 4)],
    "qwen2": [("model.layers", 4)],
    "t5": [("encoder.block", 2), ("decoder.block", 3)],
}
USUAL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "bart": {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    },
    "bloom": {"hidden_size": 16, "n_layer": 4, "n_head": 2},
    "falcon": USUAL,
    "gemma2": {**USUAL, "intermediate_size": 32, "head_dim": 8, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 4, "state_size": 4},
    "mixtral": {**USUAL, "intermediate_size": 32, "num_key_value_heads": 1, "num_local_experts": 4},
    "opt": {**USUAL, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 3},
}


def build(model_type: str, *, tied: bool = True, device: str = "meta", **settings: Any) -> nn.Module:
    """A tiny model of this architecture; on "meta" it has names and sizes but no values."""
    given_settings = SETTINGS.get(model_type) or {**USUAL, "intermediate_size": 32, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": 64,
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **given_settings,
            **settings,
        },
    )
    auto: Any = AutoModelForSeq2SeqLM if len(STACKS[model_type]) == 2 else AutoModelForCausalLM
    with torch.device(device):
        return auto.from_config(config)


def sizes_of(model: nn.Module) -> Sizes:
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


def totals_of(fragments: list[list[str]], sizes: Sizes) -> list[int]:
    return [sum(sizes[name] for name in names) for names in fragments]


def fragment_of(fragments: list[list[str]], prefix: str) -> int:
    """The one fragment that holds whatever begins with `prefix`."""
    (found,) = {number for number, names in enumerate(fragments) if any(name.startswith(prefix) for name in names)}
    return found


def check_once_in_order(fragments: list[list[str]], sizes: Sizes) -> None:
    assert sorted(chain.from_iterable(fragments)) == sorted(sizes)
    place = {name: number for number, name in enumerate(sizes)}
    for names in fragments:
        assert names
        assert names == sorted(names, key=place.__getitem__)


def check_order_of_blocks(chosen: list[int], order: Order, num_fragments: int) -> None:
    """`chosen` is the fragment of each block, in the model's order."""
    if order == "strided":
        assert chosen == [block % num_fragments for block in range(len(chosen))]
    else:
        assert chosen == sorted(chosen)
        assert set(chosen) == set(range(num_fragments))


@st.composite
def models(draw: st.DrawFn) -> tuple[Sizes, list[str], list[str]]:
    """Sizes, and the prefixes of blocks and of the modules beside them.

    Blocks of one parameter set each, with experts; between the stacks are embeddings, norms and a head.
    """
    size = st.integers(10, 20)
    sizes: Sizes = {}
    blocks, others = [], []
    stacks = draw(st.lists(st.sampled_from(["encoder", "model.layers", "a.b.h"]), min_size=1, max_size=3, unique=True))
    for stack in stacks:
        for number in range(draw(st.integers(0, 2))):
            others.append(f"{stack}_norm{number}.")
            sizes |= {f"{stack}_norm{number}.{kind}": draw(st.integers(0, 99)) for kind in ("weight", "bias")}
        for number in range(draw(st.integers(1, 7))):
            blocks.append(f"{stack}.{number}.")
            sizes |= {
                f"{stack}.{number}.{name}": draw(size) for name in ("norm.bias", "mlp.experts.7.weight", "scale")
            }
    if draw(st.booleans()):
        others.append("head.")
        sizes["head.weight"] = draw(st.integers(1, 500))
    return sizes, blocks, others


@given(models(), st.sampled_from(ORDERS), st.data())
def test_every_cut_has_whole_blocks_and_each_parameter_once(
    model: tuple[Sizes, list[str], list[str]], order: Order, data: st.DataObject
) -> None:
    sizes, blocks, others = model
    num_fragments = data.draw(st.integers(2, max(2, len(blocks))))
    if len(blocks) < 2:
        with pytest.raises(ConfigError, match="show 1 block: take 1, or"):
            cut_into_fragments(sizes, num_fragments, order)
        return
    fragments = cut_into_fragments(sizes, num_fragments, order)
    assert len(fragments) == num_fragments
    check_once_in_order(fragments, sizes)
    check_order_of_blocks([fragment_of(fragments, block) for block in blocks], order, num_fragments)

    # What lies outside the blocks went, largest first, to the smallest fragment of the time. So the last that came to
    # a fragment found it no larger than any is in the end.
    weights = {p: sum(size for name, size in sizes.items() if name.startswith(p)) for p in blocks + others}
    totals = totals_of(fragments, sizes)
    for fragment, total in enumerate(totals):
        received = [weights[prefix] for prefix in others if fragment_of(fragments, prefix) == fragment]
        if received:
            assert total - min(received) <= min(totals)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=30), st.data())
def test_runs_are_at_most_one_block_from_their_share(blocks: list[int], data: st.DataObject) -> None:
    sizes = {f"layers.{number}.mlp.weight": size for number, size in enumerate(blocks)}
    num_fragments = data.draw(st.integers(2, len(blocks)))
    fragments = cut_into_fragments(sizes, num_fragments, "sequential")
    check_once_in_order(fragments, sizes)
    totals = totals_of(fragments, sizes)
    assert max(totals) <= sum(blocks) / num_fragments + max(blocks)


@pytest.mark.parametrize("sizes", [{"h.0.a.w": 5, "h.1.a.w": 5, "norm.weight": 1}, {"only.weight": 3}])
def test_one_fragment_takes_everything_with_or_without_blocks(sizes: Sizes) -> None:
    for order in ORDERS:
        assert cut_into_fragments(sizes, 1, order) == [list(sizes)]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", STACKS)
def test_blocks_of_real_models(model_type: str, tied: bool) -> None:
    sizes = sizes_of(build(model_type, tied=tied))
    blocks = [f"{path}.{number}." for path, length in STACKS[model_type] for number in range(length)]
    for order in ORDERS:
        for num_fragments in range(2, len(blocks) + 1):
            fragments = cut_into_fragments(sizes, num_fragments, order)
            check_once_in_order(fragments, sizes)
            check_order_of_blocks([fragment_of(fragments, block) for block in blocks], order, num_fragments)
        with pytest.raises(
            ConfigError, match=f"num_fragments=9: .* show {len(blocks)} blocks: take 1 to {len(blocks)}"
        ):
            cut_into_fragments(sizes, 9, order)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_of_a_lora_model(order: Order) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    sizes = sizes_of(get_peft_model(build("llama", tied=False, device="cpu"), lora))
    blocks = [f"base_model.model.model.layers.{number}." for number in range(4)]
    assert f"{blocks[0]}self_attn.q_proj.lora_A.default.weight" in sizes
    fragments = cut_into_fragments(sizes, 3, order)
    check_once_in_order(fragments, sizes)
    check_order_of_blocks([fragment_of(fragments, block) for block in blocks], order, 3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"num_hidden_layers": 12}),
        ("gpt2", {"n_layer": 12, "n_positions": 16}),
        ("mixtral", {"num_hidden_layers": 12}),
    ],
)
def test_fragments_are_about_equal(model_type: str, settings: dict[str, Any], order: Order) -> None:
    sizes = sizes_of(build(model_type, tied=False, **settings))
    for num_fragments in (2, 3, 4, 5, 6):
        totals = totals_of(cut_into_fragments(sizes, num_fragments, order), sizes)
        assert max(totals) <= 2 * min(totals)


def test_runs_balance_elements_not_blocks() -> None:
    sizes = {f"model.layers.{number}.mlp.weight": 1 if number < 6 else 6 for number in range(8)}
    fragments = cut_into_fragments(sizes, 3, "sequential")
    assert [len(names) for names in fragments] == [6, 1, 1]
    assert totals_of(fragments, sizes) == [6, 6, 6]


@pytest.mark.parametrize(
    ("sizes", "fragments"),
    [
        pytest.param(
            {"wte.weight": 9, "h.0.a.w": 5, "h.1.a.w": 5, "h.2.a.w": 5, "ln.weight": 1, "ln.bias": 1},
            [["h.0.a.w", "h.2.a.w", "ln.weight", "ln.bias"], ["wte.weight", "h.1.a.w"]],
            id="a module outside the blocks stays whole",
        ),
        pytest.param(
            {"h.0.a.w": 5, "h.1.a.w": 5, "x.weight": 2, "y.weight": 2, "z.weight": 2},
            [["h.0.a.w", "x.weight", "z.weight"], ["h.1.a.w", "y.weight"]],
            id="equally large: in the model's order, the first fragment first",
        ),
        pytest.param(
            {"cls_token": 1, "h.0.a.w": 5, "h.1.a.w": 6, "scale": 2},
            [["h.0.a.w", "scale"], ["cls_token", "h.1.a.w"]],
            id="parameters of the model itself",
        ),
        pytest.param(
            {"h.0.mlp.experts.0.w": 9, "h.0.mlp.experts.1.w": 9, "h.1.mlp.experts.0.w": 9, "h.1.mlp.experts.1.w": 9},
            [["h.0.mlp.experts.0.w", "h.0.mlp.experts.1.w"], ["h.1.mlp.experts.0.w", "h.1.mlp.experts.1.w"]],
            id="experts are part of their block",
        ),
        pytest.param(
            {"h.6.a.w": 5, "h.8.a.w": 5, "h.10.a.w": 5},
            [["h.6.a.w", "h.10.a.w"], ["h.8.a.w"]],
            id="frozen blocks do not count",
        ),
        pytest.param(
            {"stem.0.conv.w": 2, "stem.1.conv.w": 1, "stem.2.conv.w": 1, "h.0.a.w": 9, "h.1.a.w": 9},
            [["stem.0.conv.w", "h.0.a.w"], ["stem.1.conv.w", "stem.2.conv.w", "h.1.a.w"]],
            id="a list of small modules is no stack, however long",
        ),
        pytest.param(
            {"enc.0.a.w": 6, "dec.0.a.w": 9, "dec.1.a.w": 9},
            [["enc.0.a.w", "dec.1.a.w"], ["dec.0.a.w"]],
            id="a stack of one block",
        ),
        pytest.param(
            {"h.0.q.lora_A.w": 1, "h.1.q.lora_A.w": 1, "head.0.weight": 50, "head.0.bias": 2, "head.2.weight": 40},
            [["h.0.q.lora_A.w", "head.0.weight", "head.0.bias"], ["h.1.q.lora_A.w", "head.2.weight"]],
            id="a head that outweighs the adapters is no stack",
        ),
        pytest.param(
            {"0.weight": 1, "0.bias": 1, "2.weight": 1, "4.weight": 1},
            [["0.weight", "0.bias", "4.weight"], ["2.weight"]],
            id="a plain nn.Sequential",
        ),
        pytest.param(
            {"fc1.weight": 3, "layer2a.3b.weight": 1, "h.0.a.w": 5, "h.1.a.w": 5},
            [["fc1.weight", "h.0.a.w"], ["layer2a.3b.weight", "h.1.a.w"]],
            id="digits within a name are no number",
        ),
    ],
)
def test_strided_cuts(sizes: Sizes, fragments: list[list[str]]) -> None:
    assert cut_into_fragments(sizes, 2, "strided") == fragments


@pytest.mark.parametrize(
    ("names", "num_fragments", "message"),
    [
        pytest.param(["embed.weight", "norm.weight"], 2, "num_fragments=2: .* show 0 blocks: take 1, or", id="none"),
        pytest.param(["h.0.a.w", "norm.weight"], 2, "num_fragments=2: .* show 1 block: take 1, or", id="one"),
        pytest.param(["h.0.a.w", "h.1.a.w"], 3, "num_fragments=3: .* show 2 blocks: take 1 to 2, or", id="too few"),
        pytest.param(
            ["h.0.a.w", "h.1.a.w"], 0, "num_fragments=0: .* show 2 blocks: take 1 to 2, or", id="no fragments"
        ),
        pytest.param(["h.0.a.w", "h.0.b.1.w"], 2, "num_fragments=2: .* show 1 block: take 1, or", id="nested"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_too_few_blocks(names: list[str], num_fragments: int, message: str, order: Order) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_into_fragments(dict.fromkeys(names, 3), num_fragments, order)


LLAMA_LIKE = dict.fromkeys(["embed.weight", "h.0.attn.w", "h.0.mlp.w", "h.1.attn.w", "h.1.mlp.w", "head.weight"], 4)


def test_the_first_pattern_that_finds_something_takes_the_parameter() -> None:
    fragments = cut_into_fragments(LLAMA_LIKE, 3, "strided", [r"mlp", r"^h\.", "."])
    assert fragments == [["h.0.mlp.w", "h.1.mlp.w"], ["h.0.attn.w", "h.1.attn.w"], ["embed.weight", "head.weight"]]


def test_patterns_need_no_blocks_and_one_is_enough() -> None:
    assert cut_into_fragments({"b.w": 1, "a.w": 1}, 2, "sequential", ["a", "b"]) == [["a.w"], ["b.w"]]
    assert cut_into_fragments(LLAMA_LIKE, 1, "strided", ["."]) == [list(LLAMA_LIKE)]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        pytest.param(["e", "["], "'[' is no regular expression (unterminated character set", id="invalid"),
        pytest.param(["e", "a{9999999999}"], "'a{9999999999}' is no regular expression", id="overflow"),
        pytest.param(["embed", r"h\.0"], "none matches h.1.attn.w; widen one", id="gap"),
        pytest.param([".", "lm_head"], "'lm_head' matches nothing that those before it leave", id="unused"),
        pytest.param([".", "mlp"], "'mlp' matches nothing that those before it leave; correct it", id="hidden"),
    ],
)
def test_wrong_patterns(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        cut_into_fragments(LLAMA_LIKE, len(patterns), "strided", patterns)


def test_description() -> None:
    sizes = {
        "embed.weight": 2_000_000,
        **{f"model.h.{n}.a.{p}": 50_000 for n in range(8) for p in "wb"},
        "norm.weight": 5,
        "norm.bias": 5,
    }
    assert describe_fragments(cut_into_fragments(sizes, 2, "strided"), sizes).splitlines() == [
        "fragment 0: 2.40M parameters in 9 tensors: embed; model.h 0, 2, 4, 6",
        "fragment 1: 400k parameters in 10 tensors: model.h 1, 3, 5, 7; norm",
    ]
    assert describe_fragments(cut_into_fragments(sizes, 2, "sequential"), sizes).splitlines() == [
        "fragment 0: 2.40M parameters in 9 tensors: embed; model.h 0-3",
        "fragment 1: 400k parameters in 10 tensors: model.h 4-7; norm",
    ]
    assert describe_fragments([["0.weight"], ["2.weight", "2.bias"]], {"0.weight": 3, "2.weight": 4, "2.bias": 1}) == (
        "fragment 0: 3 parameters in 1 tensor: 0\nfragment 1: 5 parameters in 2 tensors: 2"
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_writing_a_fragment_writes_its_parameters_alone(tied: bool) -> None:
    model = build("llama", tied=tied, device="cpu")
    shards = PlainShards(model)
    fragments = cut_into_fragments(shards.sizes, 3, "strided")
    parts = [FragmentShards(shards, names) for names in fragments]
    assert {part.description for part in parts} == {"DDP"}
    assert all(part.is_replicated for part in parts)
    assert sum(part.num_parameters for part in parts) == shards.num_parameters
    for number, part in enumerate(parts):
        assert list(part.sizes.items()) == [(name, shards.sizes[name]) for name in fragments[number]]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for segment in part.segments():
            segment.values.fill_(100 + number)
        part.commit()
        for name, parameter in model.named_parameters():
            expected = torch.full_like(parameter, 100 + number) if name in fragments[number] else before[name]
            assert torch.equal(parameter, expected)
    assert all(bool((parameter >= 100).all()) for parameter in model.parameters())


def test_segments_are_looked_up_each_time() -> None:
    layer = nn.Linear(3, 2)
    part = FragmentShards(PlainShards(layer), ["bias"])
    part.segments()
    layer.bias.data = torch.zeros(2)  # as an engine does that moves its buffers
    (segment,) = part.segments()
    segment.values.fill_(5)
    assert layer.bias.tolist() == [5, 5]


class AllRanks(IslandGroup):
    """An island whose ranks answer with what is known beforehand."""

    def __init__(self, answers: list[Any]) -> None:
        self.rank, self.size, self.group = 0, len(answers), None
        self._answers = answers

    def gather(self, item: Any) -> list[Any]:
        return self._answers


SHARDED = {"embed.weight": 7, "h.0.a.w": 12, "h.0.a.b": 1, "h.1.a.w": 9, "h.2.a.w": 5, "norm.weight": 3}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 40])  # some of 40 ranks hold nothing of a fragment
@pytest.mark.parametrize("cut", get_args(Cut))
def test_ranks_together_hold_every_fragment(cut: Cut, num_ranks: int) -> None:
    ranks = [make_shards(SHARDED, num_ranks, rank, cut) for rank in range(num_ranks)]
    held = []
    for names in cut_into_fragments(SHARDED, 3, "strided"):
        parts = [FragmentShards(shards, names) for shards in ranks]
        assert all(part.is_replicated == (cut == "whole") for part in parts)
        check_cover(parts[0], AllRanks([{"sizes": part.sizes, "intervals": part.intervals()} for part in parts]))
        held += [segment for part in parts for segment in part.segments()]
    everything = [segment for shards in ranks for segment in shards.segments()]
    assert sorted((s.name, s.start, s.numel) for s in held) == sorted((s.name, s.start, s.numel) for s in everything)


@pytest.mark.parametrize("cut", get_args(Cut))
def test_a_fragment_moves_in_and_out_by_itself(cut: Cut) -> None:
    shards = make_shards(SHARDED, 1, 0, cut)
    before = torch.arange(1.0, shards.num_parameters + 1)
    shards.write(before)
    names = cut_into_fragments(SHARDED, 2, "strided")[1]
    partition = AlignedPartition(FragmentShards(shards, names), IslandGroup())
    vector = torch.empty(partition.numel)
    partition.gather(vector)
    partition.scatter(-vector)
    assert shards.num_commits == 1
    offsets = shards.offsets()
    mine = torch.zeros(shards.num_parameters, dtype=torch.bool)
    for name in names:
        mine[offsets[name] : offsets[name] + SHARDED[name]] = True
    assert torch.equal(shards.read(), torch.where(mine, -before, before))
