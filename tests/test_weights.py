"""Reading a model's config and tensors: what is read, what is made from a seed, and every refusal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from serving import weights as weights_module
from serving.deepseek_v2 import DeepseekV2
from serving.model_config import (
    LITE,
    PRESETS,
    TINY,
    ModelConfig,
    ModelError,
    YarnScaling,
    load_config,
    preset,
)
from serving.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    SeededWeights,
    load_weights,
    random_weights,
    stored_dtype,
    tensor_shapes,
)

SMALL = dataclasses.replace(TINY, num_hidden_layers=2, vocab_size=64)
ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with a config.json and one file of weights."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL.to_json()))
    save_file(random_weights(SMALL, 3), tmp_path / SINGLE_FILE)
    return tmp_path


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    change(tensors)
    save_file(tensors, directory / SINGLE_FILE)


def shard(directory: Path) -> None:
    """Splits the one file into two and an index."""
    tensors = load_file(directory / SINGLE_FILE)
    (directory / SINGLE_FILE).unlink()
    names = sorted(tensors)
    where = {
        name: f"model-0000{1 + position % 2}-of-00002.safetensors" for position, name in enumerate(names)
    }
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, directory / file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_their_config_json(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[name].to_json()))
    assert load_config(tmp_path) == preset(name)


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match="'huge' is unknown; known: lite, small, tiny"):
        preset("huge")


@pytest.mark.parametrize(
    ("config", "shard_size"),
    [
        (SMALL, "1GB"),
        (dataclasses.replace(SMALL, rope_scaling=LITE.rope_scaling, max_position_embeddings=163840), "100KB"),
        (dataclasses.replace(SMALL, q_lora_rank=16, tie_word_embeddings=True, eos_token_id=(2, 5)), "1GB"),
    ],
)
def test_what_transformers_saved_loads_and_computes_the_same(
    config: ModelConfig, shard_size: str, tmp_path: Path
) -> None:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    theirs = DeepseekV2ForCausalLM(DeepseekV2Config(**config.to_json(), initializer_range=0.2)).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX_FILE).exists() == (shard_size == "100KB")
    read = load_config(tmp_path)
    assert read == config
    model = DeepseekV2(read, load_weights(read, tmp_path), range(8))
    ids_T = torch.tensor([5, 9, 60, 33])
    with torch.no_grad():
        x_TD = model.embed(ids_T)
        for layer in range(2):
            q_THE, kv_TC = model.project(layer, x_TD, torch.arange(4))
            x_TD = model.output(layer, model.attend(q_THE, kv_TC, torch.arange(4)[None], (4,), (4,)), x_TD)
            h_TD = model.mlp_input(layer, x_TD)
            if model.is_moe(layer):
                x_TD = x_TD + model.shared_experts(layer, h_TD)
                x_TD = x_TD + model.experts(layer, h_TD, *model.route(layer, h_TD))
            else:
                x_TD = x_TD + model.dense_mlp(layer, h_TD)
        wanted = theirs(ids_T[None]).logits[0]
        torch.testing.assert_close(model.logits(x_TD), wanted, rtol=1e-4, atol=5e-5)
    assert wanted.std() > 0.1


def test_shards_and_single_file_hold_the_same(saved: Path) -> None:
    single = dict(load_weights(SMALL, saved))
    shard(saved)
    sharded = dict(load_weights(SMALL, saved))
    assert single.keys() == sharded.keys() == tensor_shapes(SMALL).keys()
    made = random_weights(SMALL, 3)
    for name, tensor in single.items():
        assert torch.equal(tensor, made[name])
        assert torch.equal(tensor, sharded[name])


def test_a_rank_gets_only_its_experts(saved: Path) -> None:
    loaded, made = (
        load_weights(SMALL, saved, experts=range(2, 4)),
        random_weights(SMALL, 3, experts=range(2, 4)),
    )
    assert list(loaded) == list(made) == list(tensor_shapes(SMALL, range(2, 4)))
    assert {name.split(".experts.")[1].split(".")[0] for name in loaded if ".mlp.experts." in name} == {
        "2",
        "3",
    }
    for name in loaded:
        assert torch.equal(loaded[name], made[name])
    assert DeepseekV2(SMALL, loaded, range(2, 4)).experts_owned == range(2, 4)


def test_weights_come_in_the_asked_type_and_the_router_in_float32(saved: Path) -> None:
    for weights in (load_weights(SMALL, saved, torch.bfloat16), random_weights(SMALL, 3, torch.bfloat16)):
        types = {name: tensor.dtype for name, tensor in weights.items()}
        assert types.pop(ROUTER) is torch.float32
        assert set(types.values()) == {torch.bfloat16}


def test_a_seed_gives_the_same_weights_and_another_gives_others() -> None:
    first, same, other = (random_weights(SMALL, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    values = {tensor.flatten()[0].item() for tensor in first.values()}
    assert len(values) == len(first), "two tensors from one stream of numbers"


def test_rope_is_read_in_both_layouts(saved: Path) -> None:
    yarn = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.707}
    wanted = YarnScaling(
        factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707
    )
    edit_config(saved, lambda c: c.update(rope_theta=5000, rope_scaling={"type": "yarn", **yarn}))
    old = load_config(saved)
    assert (old.rope_theta, old.rope_scaling) == (5000.0, wanted)
    new_layout = {"rope_type": "yarn", "rope_theta": 5000.0, **yarn}
    edit_config(
        saved, lambda c: (c.pop("rope_scaling"), c.pop("rope_theta"), c.update(rope_parameters=new_layout))
    )
    assert load_config(saved) == old
    edit_config(saved, lambda c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 700}))
    assert (load_config(saved).rope_theta, load_config(saved).rope_scaling) == (700.0, None)


def test_keys_that_say_nothing_about_arithmetic_are_ignored(saved: Path) -> None:
    edit_config(saved, lambda c: c.update(auto_map={"x": "y"}, aux_loss_alpha=0.001, hidden_act=None))
    assert load_config(saved) == SMALL


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "deepseek_v3"},
            r"'model_type' and 'architectures' are \"deepseek_v3\".*no other model",
        ),
        ({"architectures": ["DeepseekV2Model"]}, r"expected .*DeepseekV2ForCausalLM"),
        ({"kv_lora_rank": "512"}, "'kv_lora_rank' is \"512\"; expected a whole number"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' is null; expected a whole number"),
        ({"hidden_size": True}, "'hidden_size' is true; expected a whole number"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' is \"small\"; expected a number"),
        ({"vocab_size": 0}, "'vocab_size' is 0; expected at least 1"),
        ({"q_lora_rank": 0}, "'q_lora_rank' is 0; expected null or at least 1"),
        ({"qk_rope_head_dim": 15}, "'qk_rope_head_dim' is 15; rotation needs an even number"),
        (
            {"first_k_dense_replace": 3},
            r"'first_k_dense_replace' is 3; expected 0 to num_hidden_layers \(2\)",
        ),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9; the routing leaves only 8 experts"),
        ({"num_key_value_heads": 2}, "'num_key_value_heads' is 2; latent attention has one per head"),
        (
            {"topk_method": "noaux_tc"},
            "'topk_method' is 'noaux_tc'; expected one of greedy, group_limited_greedy",
        ),
        ({"topk_method": "group_limited_greedy"}, "needs both"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            r"n_group must divide n_routed_experts \(8\)",
        ),
        (
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 5},
            r"'topk_group' is 5; expected 1 to n_group \(4\)",
        ),
        (
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1},
            "'num_experts_per_tok' is 2; the routing leaves only 1 experts",
        ),
        ({"norm_topk_prob": True}, "'norm_topk_prob' is true; only false is supported"),
        ({"scoring_func": "sigmoid"}, '\'scoring_func\' is "sigmoid"; only "softmax"'),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' is 2; only 1"),
        ({"hidden_act": "gelu"}, "'hidden_act' is \"gelu\""),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config' is .*fp8"),
        ({"eos_token_id": "end"}, "'eos_token_id' is \"end\"; expected a whole number"),
        ({"rope_theta": 1.0}, "'rope_theta' is 1.0; expected more than 1"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "'rope_scaling' has type \"longrope\"; supported: default, yarn",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "'rope_scaling' has no 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor 0.5"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "low_freq": 1}},
            "'rope_scaling' has 'low_freq'; known: ",
        ),
        ({"rope_scaling": "yarn"}, "'rope_scaling' is \"yarn\"; expected an object or null"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(saved: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(saved, lambda c: c.update(changes))
    with pytest.raises(ModelError, match=said) as caught:
        load_config(saved)
    assert str(caught.value).startswith(str(saved / "config.json"))


@pytest.mark.parametrize(
    "key", ["kv_lora_rank", "q_lora_rank", "num_experts_per_tok", "first_k_dense_replace"]
)
def test_a_missing_key_is_named(saved: Path, key: str) -> None:
    edit_config(saved, lambda c: c.pop(key))
    with pytest.raises(ModelError, match=f"config.json: key '{key}' is missing; take the config.json"):
        load_config(saved)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "cannot be read as JSON"), ("[]", "a JSON list; expected an object")]
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=said):
        load_config(tmp_path)


def test_missing_files_are_named(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json; give the directory .* \(lite, small, tiny\)"):
        load_config(tmp_path / "nowhere")
    shard(saved)
    gone = saved / "model-00002-of-00002.safetensors"
    gone.unlink()
    with pytest.raises(ModelError, match=f"{gone.name}: is missing, though {INDEX_FILE} lists it"):
        load_weights(SMALL, saved)
    (saved / INDEX_FILE).unlink()
    with pytest.raises(ModelError, match=f"has neither {SINGLE_FILE} nor {INDEX_FILE}"):
        load_weights(SMALL, saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: (t.pop("model.norm.weight"), t.pop(ROUTER)),
            rf"no tensor '{ROUTER}' \(and 1 more\); expected shape \[8, 64\]",
        ),
        (lambda t: t.update(stray=torch.zeros(1)), "tensor 'stray' has no place in the model"),
        (
            lambda t: t.update({ROUTER: torch.zeros(4, 64)}),
            rf"'{ROUTER}' has shape \[4, 64\]; expected \[8, 64\] from config.json",
        ),
        (
            lambda t: t.update({ROUTER: torch.zeros(8, 64, dtype=torch.int8)}),
            f"'{ROUTER}' is I8; expected one of BF16, F16, F32, F64",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    edit_weights(saved, change)
    with pytest.raises(ModelError, match=said) as caught:
        load_weights(SMALL, saved)
    assert str(saved / SINGLE_FILE) in str(caught.value)


def test_a_tied_model_may_keep_a_copy_of_its_embedding_and_old_files_their_frequencies(saved: Path) -> None:
    tied = dataclasses.replace(SMALL, tie_word_embeddings=True)
    edit_weights(saved, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert "lm_head.weight" not in load_weights(tied, saved)
    assert "lm_head.weight" in load_weights(SMALL, saved)


def test_damaged_files_are_refused(saved: Path) -> None:
    whole = (saved / SINGLE_FILE).read_bytes()
    (saved / SINGLE_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=f"{SINGLE_FILE}: not a whole safetensors file"):
        load_weights(SMALL, saved)
    (saved / SINGLE_FILE).write_bytes(whole)
    shard(saved)
    index = json.loads((saved / INDEX_FILE).read_text())
    index["weight_map"][ROUTER] = next(
        f for f in index["weight_map"].values() if f != index["weight_map"][ROUTER]
    )
    (saved / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"has no tensor '{ROUTER}', though {INDEX_FILE} says so"):
        load_weights(SMALL, saved)
    (saved / INDEX_FILE).write_text("{}")
    with pytest.raises(ModelError, match=f"{INDEX_FILE}: not an index of shards"):
        load_weights(SMALL, saved)


# A published directory, as it lies there ----------------------------------------------------------------------

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "deepseek_v2",
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    # The sizes are small; everything above is as DeepSeek-V2-Lite has it, but for the experts of a token.
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 128,
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A directory in the layout of DeepSeek-V2-Lite: its config's keys, bfloat16 in shards, an index."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = load_config(tmp_path)
    tensors = random_weights(config, 1, torch.bfloat16)
    # Published ones are bfloat16 throughout, the router's too.
    save_file({name: one.to(torch.bfloat16) for name, one in tensors.items()}, tmp_path / SINGLE_FILE)
    shard(tmp_path)
    return tmp_path


def test_a_published_directory_is_read_as_it_lies(published: Path) -> None:
    config = load_config(published)
    assert config.q_lora_rank is None and config.rope_scaling is not None
    assert (config.rope_scaling.factor, config.rope_scaling.mscale) == (40, 0.707)
    dtype = stored_dtype(published)
    assert dtype == torch.bfloat16
    checkpoint = load_weights(config, published, dtype, experts=range(2))
    opened: list[tuple[Path, str]] = []
    with patch.object(weights_module, "_opened", counting(opened)):
        model = DeepseekV2(config, checkpoint, range(2))
    assert sorted(path.name for path, _ in opened) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ], "each shard once"  # fmt: skip
    assert {device for _, device in opened} == {"cpu"}
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        x_TD = model.embed(torch.tensor([1, 5, 100]))
        query_THE, latent_TC = model.project(0, x_TD, torch.arange(3))
        assert query_THE.dtype == latent_TC.dtype == torch.bfloat16
        ids_TK, weights_TK = model.route(1, model.mlp_input(1, x_TD))
        assert weights_TK.dtype == torch.float32 and ids_TK.shape == (3, 2)
        assert model.logits(x_TD).dtype == torch.float32


def counting(opened: list[tuple[Path, str]]) -> Callable[..., Any]:
    open_file = weights_module._opened

    def counted(path: Path, device: torch.device | str = "cpu") -> Any:
        opened.append((path, str(device)))
        return open_file(path, device)

    return counted


def test_each_tensor_goes_to_the_device_by_itself(published: Path) -> None:
    """Nothing is read before it is asked for, and the file is opened for the device that it goes to."""
    config = load_config(published)
    checkpoint = load_weights(config, published, torch.bfloat16, device=torch.device("meta"))
    asked: list[str] = []

    class File:
        def get_tensor(self, name: str) -> torch.Tensor:
            asked.append(name)
            return torch.empty(2, dtype=torch.bfloat16, device="meta")

    opened: list[tuple[Path, str]] = []

    def opening(path: Path, device: torch.device | str) -> File:
        opened.append((path, str(device)))
        return File()

    with patch.object(weights_module, "_opened", opening):
        assert "model.norm.weight" in checkpoint and asked == []
        tensor = checkpoint["model.norm.weight"]
    assert tensor.device.type == "meta" and asked == ["model.norm.weight"]
    assert [device for _, device in opened] == ["meta"]


def test_seeded_weights_are_made_one_by_one() -> None:
    seeded = SeededWeights(SMALL, 3, experts=range(2, 5))
    assert seeded.keys() == tensor_shapes(SMALL, range(2, 5)).keys()
    whole = random_weights(SMALL, 3)
    for name in seeded:
        assert torch.equal(seeded[name], whole[name])
    assert "model.layers.1.mlp.experts.0.up_proj.weight" not in seeded
    assert SeededWeights(SMALL, 3, torch.bfloat16)[ROUTER].dtype == torch.float32


def test_a_key_that_is_missing_and_one_too_many_are_named(published: Path) -> None:
    index = json.loads((published / INDEX_FILE).read_text())
    config = load_config(published)
    index["weight_map"]["model.layers.3.mlp.gate.weight"] = "model-00001-of-00002.safetensors"
    (published / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"'model.layers.3.mlp.gate.weight' has no place"):
        load_weights(config, published)
    del index["weight_map"]["model.layers.3.mlp.gate.weight"], index["weight_map"][ROUTER]
    (published / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"has no tensor '{ROUTER}'"):
        load_weights(config, published)
