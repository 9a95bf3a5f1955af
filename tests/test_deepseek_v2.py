"""The model against transformers' DeepseekV2ForCausalLM, and its own forms against each other.

Shapes: T tokens, B rows, M table width, C latent width (see ``serving.attention``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from serving import attention, rope
from serving.deepseek_v2 import DeepseekV2
from serving.model_config import LITE, TINY, ModelError, YarnScaling
from serving.weights import expert_range, random_weights, tensor_shapes

YARN = YarnScaling(factor=8.0, original_max_position_embeddings=32, mscale=0.707, mscale_all_dim=1.0)
VARIANTS = {
    "tiny": TINY,
    "yarn": dataclasses.replace(TINY, rope_scaling=YARN, max_position_embeddings=256),
    "yarn-without-mscale": dataclasses.replace(
        TINY,
        rope_scaling=YarnScaling(
            factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=2.0, truncate=False
        ),
        max_position_embeddings=256,
        rope_theta=5000.0,
    ),
    "groups": dataclasses.replace(
        TINY,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        n_shared_experts=2,
    ),
    "low-rank-queries": dataclasses.replace(TINY, q_lora_rank=24, qk_nope_head_dim=24, v_head_dim=8),
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True, rms_norm_eps=1e-2),
}
SEED = 7
ALL = range(8)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[DeepseekV2, Any]:
    """Our model and transformers', from the same files."""
    from transformers import DeepseekV2ForCausalLM

    config = VARIANTS[request.param]
    weights = random_weights(config, SEED)
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_json()))
    theirs, report = DeepseekV2ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return DeepseekV2(config, weights, ALL), theirs.eval()


@pytest.fixture(scope="module")
def tiny() -> DeepseekV2:
    return DeepseekV2(TINY, random_weights(TINY, SEED), ALL)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, TINY.vocab_size, (length,), generator=generator).tolist() for length in lengths]


class Pool:
    """Cached latents of several rows in shuffled slots; what nobody wrote is NaN, unused entries are -1."""

    def __init__(self, model: DeepseekV2, rows: int, capacity: int, *, plain: bool = False) -> None:
        config = model.config
        self.model, self.plain = model, plain
        self.kv = [
            torch.full((rows * capacity + 5, config.latent_dim), torch.nan, dtype=model.dtype)
            for _ in range(config.num_hidden_layers)
        ]
        order = torch.randperm(rows * capacity + 5, generator=torch.Generator().manual_seed(2))
        self.slots_BM = order[: rows * capacity].view(rows, capacity)
        self.table_BM = torch.full_like(self.slots_BM, -1)
        self.lens = [0] * rows

    def forward(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Appends each row's tokens (perhaps none) and returns the logits of all of them, row after row."""
        positions = [torch.arange(n, n + len(row)) for n, row in zip(self.lens, tokens, strict=True)]
        for row, at in enumerate(positions):
            self.table_BM[row, at] = self.slots_BM[row, at]
            self.lens[row] += len(at)
        slots_T = torch.cat([self.slots_BM[row, at] for row, at in enumerate(positions)])
        ids_T = torch.tensor([token for row in tokens for token in row])
        lens = tuple(self.lens), tuple(len(row) for row in tokens)
        return self._layers(ids_T, torch.cat(positions), slots_T, *lens)

    def _layers(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        kv_lens: tuple[int, ...],
        q_lens: tuple[int, ...],
    ) -> torch.Tensor:
        model = self.model
        x_TD = model.embed(ids_T)
        for layer, kv_SC in enumerate(self.kv):
            if self.plain:
                q, latent_TC = model.project_plain(layer, x_TD, positions_T)
                kv_SC.index_copy_(0, slots_T, latent_TC)
                o = model.attend_plain(q, kv_SC, self.table_BM, kv_lens, q_lens, layer=layer)
                x_TD = model.output_plain(layer, o, x_TD)
            else:
                q, latent_TC = model.project(layer, x_TD, positions_T)
                kv_SC.index_copy_(0, slots_T, latent_TC)
                o = model.attend(q, kv_SC, self.table_BM, kv_lens, q_lens)
                x_TD = model.output(layer, o, x_TD)
            h_TD = model.mlp_input(layer, x_TD)
            if model.is_moe(layer):
                routed_TD = model.experts(layer, h_TD, *model.route(layer, h_TD))
                x_TD = x_TD + routed_TD + model.shared_experts(layer, h_TD)
            else:
                x_TD = x_TD + model.dense_mlp(layer, h_TD)
        return model.logits(x_TD)


def greedy(model: DeepseekV2, given: list[list[int]], count: int) -> tuple[list[list[int]], torch.Tensor]:
    """The next ``count`` tokens of each prompt, decoded together, and their logits (B, count, V)."""
    pool = Pool(model, len(given), max(map(len, given)) + count)
    lasts = torch.tensor([len(row) for row in given]).cumsum(0) - 1
    steps = [pool.forward(given)[lasts]]
    while len(steps) < count:
        steps.append(pool.forward(steps[-1].argmax(-1, keepdim=True).tolist()))
    logits_BNV = torch.stack(steps, dim=1)
    return logits_BNV.argmax(-1).tolist(), logits_BNV


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=5e-5)


def test_logits_equal_transformers(pair: tuple[DeepseekV2, Any]) -> None:
    ours, theirs = pair
    given = prompts(90, 1, 17)
    got = Pool(ours, 3, 90).forward(given)
    close(got, torch.cat([theirs(torch.tensor([row])).logits[0] for row in given]))
    assert got.std() > 0.5  # logits of nothing would agree too


def test_greedy_tokens_equal_transformers(pair: tuple[DeepseekV2, Any]) -> None:
    ours, theirs = pair
    theirs.generation_config.eos_token_id = None
    given = prompts(60, 3, 25)
    got, logits_BNV = greedy(ours, given, 24)
    for row, tokens in zip(given, got, strict=True):
        ids = torch.tensor([row])
        wanted = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert tokens == wanted[0, len(row) :].tolist()
        # A constant answer would prove little; only a random tied model may repeat its last token.
        assert len(set(tokens)) > 12 or ours.config.tie_word_embeddings
    best_BN2 = logits_BNV.topk(2).values
    assert (best_BN2[..., 0] - best_BN2[..., 1]).min() > 1e-4, "the choice must not hang on rounding"


def test_decoding_token_by_token_equals_one_prefill(tiny: DeepseekV2) -> None:
    first, second = prompts(30, 18)
    whole = Pool(tiny, 2, 30).forward([first, second])
    pool = Pool(tiny, 2, 30)
    pool.forward([first[:18], second[:6]])
    for step in range(12):
        got = pool.forward([[first[18 + step]], [second[6 + step]]])
        close(got, whole[[18 + step, 30 + 6 + step]])


def test_chunked_and_mixed_prefill_equal_one_prefill(tiny: DeepseekV2) -> None:
    first, second = prompts(40, 12)
    whole = Pool(tiny, 2, 40).forward([first, second])
    pool = Pool(tiny, 2, 40)
    parts = [([first[:16], second[:11]]), ([first[16:33], second[11:]]), ([first[33:], []])]
    got = [pool.forward(part) for part in parts]
    close(torch.cat((got[0][:16], got[1][:17], got[2])), whole[:40])
    close(torch.cat((got[0][16:], got[1][17:])), whole[40:])


@pytest.mark.parametrize("variant", ["tiny", "yarn", "low-rank-queries"])
def test_absorbed_attention_equals_plain(variant: str) -> None:
    model = DeepseekV2(VARIANTS[variant], random_weights(VARIANTS[variant], SEED), ALL)
    given = prompts(33, 7)
    absorbed, plain = Pool(model, 2, 40), Pool(model, 2, 40, plain=True)
    close(absorbed.forward(given), plain.forward(given))
    for step in range(3):
        close(absorbed.forward([[step], [9 - step]]), plain.forward([[step], [9 - step]]))


def attention_case(
    model: DeepseekV2, kv_lens: Sequence[int], tokens: int, seed: int = 3
) -> tuple[torch.Tensor, ...]:
    """Queries, pool and table of rows with these lengths; unowned slots are NaN and unused entries -1."""
    generator = torch.Generator().manual_seed(seed)
    heads, width = model.config.num_attention_heads, model.config.latent_dim
    q_THE = torch.randn(tokens, heads, width, generator=generator)
    kv_SC = torch.full((sum(kv_lens) + 3, width), torch.nan)
    table_BM = torch.full((len(kv_lens), max(kv_lens) + 2), -1)
    slots = torch.randperm(sum(kv_lens) + 3, generator=generator)[: sum(kv_lens)].split(list(kv_lens))
    for row, owned in enumerate(slots):
        table_BM[row, : len(owned)] = owned
        kv_SC[owned] = torch.randn(len(owned), width, generator=generator)
    return q_THE, kv_SC, table_BM


def test_padded_rows_are_zero_and_change_nothing(tiny: DeepseekV2) -> None:
    q_THE, kv_SC, table_BM = attention_case(tiny, (5, 0, 1, 0), 4)
    decoded = tiny.attend(q_THE, kv_SC, table_BM, (5, 0, 1, 0), (1, 1, 1, 1))
    assert decoded.isfinite().all()
    assert (decoded[[1, 3]] == 0).all()
    alone = tiny.attend(q_THE[[0, 2]], kv_SC, table_BM[[0, 2]], (5, 1), (1, 1))
    close(decoded[[0, 2]], alone)
    looped = tiny.attend(torch.cat((q_THE, q_THE[:1])), kv_SC, table_BM, (5, 0, 1, 0), (1, 1, 1, 1))
    close(looped[:4], decoded)
    assert (looped[4] == 0).all(), "a query that no row owns"
    idle = tiny.attend(q_THE, kv_SC, table_BM, (0, 0, 0, 0), (1, 1, 1, 1))
    assert idle.shape == decoded.shape
    assert (idle == 0).all()


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    further=st.integers(0, 5),
)
def test_lengths_on_the_device_give_what_lengths_on_the_host_give(
    tiny: DeepseekV2, lengths: list[int], seed: int, further: int
) -> None:
    """A captured graph reads them there: all of the table's width is computed, nothing beyond a length counts."""
    rows, kv_lens, q_lens = len(lengths), tuple(lengths), (1,) * len(lengths)
    q_THE, kv_SC, table_BM = attention_case(tiny, kv_lens, rows, seed)
    table_BM = torch.nn.functional.pad(table_BM, (0, further), value=-1)
    with torch.no_grad():
        wanted = tiny.attend(q_THE, kv_SC, table_BM, kv_lens, q_lens)
        found = tiny.attend(q_THE, kv_SC, table_BM, torch.tensor(kv_lens), torch.tensor(q_lens))
    close(found, wanted)
    assert (found[[length == 0 for length in lengths]] == 0).all()


def test_lengths_on_the_device_are_checked_by_their_shapes(tiny: DeepseekV2) -> None:
    q_THE, kv_SC, table_BM = attention_case(tiny, (5, 7), 2)
    ones, lens = torch.tensor([1, 1]), torch.tensor([5, 7])
    for kv_lens, q_lens, queries, said in (
        (lens, (1, 1), q_THE, "both as tensors"),
        (lens[:1], ones, q_THE, r"\[1\] and \[2\]"),
        (lens, ones, q_THE[:1], "1 were given"),
    ):
        with pytest.raises(ValueError, match=said):
            tiny.attend(queries, kv_SC, table_BM, kv_lens, q_lens)


def test_lengths_travel_by_value() -> None:
    for lens in ((), (3,), (0, 9, 2**40)):
        filled = attention.by_value(lens, torch.device("cpu"))
        assert torch.equal(filled, attention.on_device(lens, torch.device("cpu")))


def test_attention_follows_the_host_lengths(tiny: DeepseekV2) -> None:
    """A replay with the lengths of the step before gives other numbers: this is how lost updates corrupt."""
    q_THE, kv_SC, table_BM = attention_case(tiny, (5, 7), 2)
    fresh = tiny.attend(q_THE, kv_SC, table_BM, (5, 7), (1, 1))
    stale = tiny.attend(q_THE, kv_SC, table_BM, (4, 6), (1, 1))
    assert ((fresh - stale).abs().amax(dim=(1, 2)) > 0.01).all()


@pytest.mark.parametrize(
    ("kv_lens", "q_lens", "said"),
    [
        ((3, 9), (1, 1), "row 1 has 1 query tokens and 9 cached ones"),
        ((3, 4), (1, 5), "own 6 query tokens, but 2 were given"),
        ((1, 3), (2, 0), "row 0 has 2 query tokens and 1 cached ones"),
        ((3, -1), (1, 1), "row 1"),
        ((3,), (1,), "1 kv_lens, 1 q_lens and 2 rows of the table"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    tiny: DeepseekV2, kv_lens: tuple[int, ...], q_lens: tuple[int, ...], said: str
) -> None:
    q_THE, kv_SC, table_BM = attention_case(tiny, (3, 4), 2)
    with pytest.raises(ValueError, match=said):
        tiny.attend(q_THE, kv_SC, table_BM, kv_lens, q_lens)


@pytest.mark.parametrize("world", [2, 3, 4, 9])
def test_shares_of_experts_sum_to_the_whole(tiny: DeepseekV2, world: int) -> None:
    weights = random_weights(TINY, SEED)
    h_TD = torch.randn(20, TINY.hidden_size, generator=torch.Generator().manual_seed(4))
    ids_TK, weights_TK = tiny.route(1, h_TD)
    whole = tiny.experts(1, h_TD, ids_TK, weights_TK)
    ranges = [expert_range(TINY, rank, world) for rank in range(world)]
    assert [expert for share in ranges for expert in share] == list(ALL)
    parts = [
        DeepseekV2(TINY, random_weights(TINY, SEED, experts=share), share).experts(
            1, h_TD, ids_TK, weights_TK
        )
        for share in ranges
    ]
    close(torch.stack(parts).sum(0), whole)
    one_by_one = torch.zeros_like(whole)
    for token, (ids, shares) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            gate, up, down = (
                weights[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            )
            inner = torch.nn.functional.silu(gate @ h_TD[token]) * (up @ h_TD[token])
            one_by_one[token] += share * (down @ inner)
    close(whole, one_by_one)


class Recorder(TorchDispatchMode):
    """Keeps the aten calls made under it, as a graph capture does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


@pytest.mark.parametrize("variant", ["tiny", "groups", "low-rank-queries", "yarn"])
def test_pieces_can_be_captured_and_replayed(variant: str) -> None:
    config = VARIANTS[variant]
    model = DeepseekV2(config, random_weights(config, SEED), range(2, 6))
    generator = torch.Generator().manual_seed(5)

    def inputs() -> tuple[torch.Tensor, ...]:
        o_THR = torch.randn(6, config.num_attention_heads, config.kv_lora_rank, generator=generator)
        return (
            torch.randint(0, 512, (6,), generator=generator),
            torch.arange(6) + int(o_THR[0, 0, 0] * 9),
            o_THR,
        )

    def pieces(ids_T: torch.Tensor, positions_T: torch.Tensor, o_THR: torch.Tensor) -> list[torch.Tensor]:
        x_TD = model.embed(ids_T)
        q_THE, latent_TC = model.project(1, x_TD, positions_T)
        x_TD = model.output(1, o_THR, x_TD)
        x_TD = x_TD + model.dense_mlp(0, model.mlp_input(0, x_TD))
        h_TD = model.mlp_input(1, x_TD)
        x_TD = x_TD + model.experts(1, h_TD, *model.route(1, h_TD)) + model.shared_experts(1, h_TD)
        return [q_THE, latent_TC, model.logits(x_TD)]

    static = inputs()
    with Recorder() as recorder:
        outputs = pieces(*static)
    names = {str(call[0]) for call in recorder.calls}
    hidden_syncs = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"}
    assert not names & hidden_syncs
    assert not any("aten.index." in name or "lift_fresh" in name for name in names), names
    fresh = inputs()
    for buffer, value in zip(static, fresh, strict=True):
        buffer.copy_(value)
    for func, args, kwargs, result in recorder.calls:
        again = func(*args, **kwargs)
        for old, new in zip(_tensors(result), _tensors(again), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
    for replayed, direct in zip(outputs, pieces(*fresh), strict=True):
        assert torch.equal(replayed, direct)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def test_bfloat16_stays_near_float32(tiny: DeepseekV2) -> None:
    narrow = DeepseekV2(TINY, random_weights(TINY, SEED, torch.bfloat16), ALL)
    given = prompts(20)
    got, wanted = Pool(narrow, 1, 21).forward(given), Pool(tiny, 1, 21).forward(given)
    assert narrow.dtype is torch.bfloat16
    assert got.dtype is torch.float32
    similarity = torch.nn.functional.cosine_similarity(got, wanted, dim=-1)
    assert similarity.median() > 0.99


def test_lite_is_the_published_model() -> None:
    """Names and shapes of all its tensors, and its rotary numbers, from transformers without memory."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding

    theirs = DeepseekV2Config(**LITE.to_json())
    with torch.device("meta"):
        model = DeepseekV2ForCausalLM(theirs)
    shapes = tensor_shapes(LITE)
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert count == sum(parameter.numel() for parameter in model.parameters()) == 15_706_484_224
    for name, parameter in model.named_parameters():
        if ".experts." not in name:  # stacked in memory
            assert shapes[name] == tuple(parameter.shape)
    rotary = DeepseekV2RotaryEmbedding(theirs)
    torch.testing.assert_close(rope.inverse_frequencies(LITE), rotary.inv_freq)
    assert rope.rotation_scale(LITE) == pytest.approx(rotary.attention_scaling)
    assert rope.softmax_scale(LITE) == pytest.approx(model.model.layers[0].self_attn.scaling)


def test_wrong_use_is_explained(tiny: DeepseekV2) -> None:
    h_TD = torch.zeros(1, TINY.hidden_size)
    with pytest.raises(ModelError, match="layer 1 has routed experts"):
        tiny.dense_mlp(1, h_TD)
    with pytest.raises(ModelError, match="layer 0 has no routed experts"):
        tiny.route(0, h_TD)
    with pytest.raises(ModelError, match=r"experts range\(6, 9\) are not a contiguous part of the model's 8"):
        DeepseekV2(TINY, {}, range(6, 9))
    weights = random_weights(TINY, SEED, experts=range(4))
    with pytest.raises(ModelError, match=r"no tensor 'model.layers.1.mlp.experts.4.gate_proj.weight'"):
        DeepseekV2(TINY, weights, range(5))
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(ModelError, match=r"'model.norm.weight' has shape \[3\]; expected \[64\]"):
        DeepseekV2(TINY, weights, range(4))
