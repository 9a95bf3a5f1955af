"""DeepSeek-V2 for one rank: its heads, its share of the routed experts, in pieces the engine enqueues.

Here: the arithmetic of each layer. Not here: the pool of latents and its slots (``kv_cache.py``), collectives
between the pieces (``dp_attention.py``), sampling. Numerics follow transformers 5.24 (`models/deepseek_v2`).

Every piece is a pure function of its tensors. In all but ``attend`` and ``attend_plain`` with lengths on the host
shapes depend on shapes only, no value is looked at on the host, and no tensor is made from host data, so that
they can be captured in a graph. A layer is, in order::

    q, latent = project(layer, x, positions)          store latent in the pool, then
    x = output(layer, attend(q, pool, ...), x)        or, where a rank has some of the heads,
    x = x + sum over ranks of output_part(layer, attend(q, pool, ...))
    h = mlp_input(layer, x)
    x = x + dense_mlp(layer, h)                       or, where is_moe(layer),
    x = x + sum over ranks of experts(layer, h, *route(layer, h)) + shared_experts(layer, h)

Callers run this under ``torch.no_grad``.

Shapes: T tokens, D hidden width, H this rank's heads, N unrotated and P rotated head width, Q = N + P, R compressed
width, C = R + P latent width, E = C absorbed query width, U value head width, K experts per token, X all and
L local routed experts, I inner width of an MLP, V vocabulary, S pool slots, B rows, M table width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from serving import attention, rope
from serving.model_config import ModelConfig, ModelError
from serving.weights import tensor_shapes

# transformers gives the two inner norms its class's default, not the config's rms_norm_eps.
_LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class _Mlp:
    """Gated MLP, or several side by side: the gates of all are stacked, then the ups of all."""

    gate_up: torch.Tensor  # (2 * L * I, D); L = 1 for a single one
    down: torch.Tensor  # (D, L * I)


@dataclass(frozen=True, slots=True)
class _Moe:
    router_XD: torch.Tensor  # float32
    shared: _Mlp
    routed: _Mlp


@dataclass(frozen=True, slots=True)
class _Attention:
    query: torch.Tensor  # (H * Q, D), or (H * Q, q_lora_rank) after query_down
    query_down: torch.Tensor | None  # (q_lora_rank, D)
    query_norm: torch.Tensor | None
    latent_CD: torch.Tensor
    latent_norm_R: torch.Tensor
    key_up_HNR: torch.Tensor
    value_up_HRU: torch.Tensor
    out: torch.Tensor  # (D, H * U)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm_D: torch.Tensor
    attention: _Attention
    mlp_norm_D: torch.Tensor
    mlp: _Mlp | _Moe


class DeepseekV2:
    """The model of one rank. ``weights`` has at least ``tensor_shapes(config, experts)``; it is not kept.

    ``heads``: the rank's share (``head_range``); None: all. The latents in the pool are the same for all heads.
    Raises ModelError for a missing or misshapen tensor, or for experts that the model does not have.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        experts: range,
        heads: range | None = None,
    ) -> None:
        if experts.step != 1 or (experts and not 0 <= experts[0] <= experts[-1] < config.n_routed_experts):
            raise ModelError(
                f"experts {experts} are not a contiguous part of the model's {config.n_routed_experts}; "
                "use expert_range"
            )
        self.config = config
        self.experts_owned = experts
        self.heads = range(config.num_attention_heads) if heads is None else heads
        take = _Taker(config, experts, weights)
        self._embedding_VD = take("model.embed_tokens.weight")
        self._layers = tuple(
            _layer(config, experts, self.heads, index, take) for index in range(config.num_hidden_layers)
        )
        self._norm_D = take("model.norm.weight")
        self._head_VD = self._embedding_VD if config.tie_word_embeddings else take("lm_head.weight")
        self._frequencies = rope.inverse_frequencies(config).to(self.device)
        self._local_L = torch.arange(experts.start, experts.stop, device=self.device)
        self._rotation_scale = rope.rotation_scale(config)
        self._softmax_scale = rope.softmax_scale(config)

    @property
    def device(self) -> torch.device:
        return self._embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_VD.dtype

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Token ids, int64 (T,), to hidden states (T, D)."""
        return F.embedding(ids_T, self._embedding_VD)

    def project(
        self, layer: int, x_TD: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed queries (T, H, E) and the latents (T, C) to store in the pool, at int64 positions (T,)."""
        q_nope_THN, q_rope_THP, latent_TC = self._project(layer, x_TD, positions_T)
        key_up_HNR = self._layers[layer].attention.key_up_HNR
        q_latent_HTR = torch.bmm(q_nope_THN.transpose(0, 1), key_up_HNR)
        return torch.cat((q_latent_HTR.transpose(0, 1), q_rope_THP), dim=-1), latent_TC

    def attend(
        self,
        q_THE: torch.Tensor,
        kv_SC: torch.Tensor,
        table_BM: torch.Tensor,
        kv_lens: attention.Lengths,
        q_lens: attention.Lengths,
    ) -> torch.Tensor:
        """Latent output (T, H, R) of absorbed queries over the pool. Rows and lengths: see ``attention.py``.

        With one query in every row there is no loop over rows. With lengths on the host it is not capturable:
        shapes follow them.
        """
        scale, rank = self._softmax_scale, self.config.kv_lora_rank
        return attention.attend_absorbed(q_THE, kv_SC, table_BM, kv_lens, q_lens, scale=scale, value_dim=rank)

    def output(self, layer: int, o_THR: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """Latent output to hidden width, added to the residual stream: (T, D). For a rank with all heads."""
        return x_TD + self.output_part(layer, o_THR)

    def output_part(self, layer: int, o_THR: torch.Tensor) -> torch.Tensor:
        """What this rank's heads add to the residual stream, (T, D)."""
        return F.linear(self.values(layer, o_THR), self._layers[layer].attention.out)

    def output_share(self, layer: int, values_TV: torch.Tensor, columns: range) -> torch.Tensor:
        """What some of the ``values`` of all heads add to the residual stream, (T, D). For a rank with all heads;
        the weight is kept whole."""
        part = slice(columns.start, columns.stop)
        return F.linear(values_TV[:, part], self._layers[layer].attention.out[:, part])

    def values(self, layer: int, o_THR: torch.Tensor) -> torch.Tensor:
        """Latent output to the attended values of this rank's heads, side by side: (T, H * U)."""
        value_up_HRU = self._layers[layer].attention.value_up_HRU
        return torch.bmm(o_THR.transpose(0, 1), value_up_HRU).transpose(0, 1).flatten(1)

    def project_plain(
        self, layer: int, x_TD: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``project``, with plain queries (T, H, Q). The latents are the same."""
        q_nope_THN, q_rope_THP, latent_TC = self._project(layer, x_TD, positions_T)
        return torch.cat((q_nope_THN, q_rope_THP), dim=-1), latent_TC

    def attend_plain(
        self,
        q_THQ: torch.Tensor,
        kv_SC: torch.Tensor,
        table_BM: torch.Tensor,
        kv_lens: tuple[int, ...],
        q_lens: tuple[int, ...],
        *,
        layer: int,
    ) -> torch.Tensor:
        """Output per head (T, H, U) from keys and values expanded from latents: the oracle of ``attend``."""
        part = self._layers[layer].attention
        return attention.attend_plain(
            q_THQ, kv_SC, table_BM, kv_lens, q_lens,
            key_up_HNR=part.key_up_HNR, value_up_HRU=part.value_up_HRU, scale=self._softmax_scale,
        )  # fmt: skip

    def output_plain(self, layer: int, o_THU: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """As ``output``, from the output per head (T, H, U)."""
        return x_TD + F.linear(o_THU.flatten(1), self._layers[layer].attention.out)

    def mlp_input(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        """What the layer's MLP or experts take: the normed residual stream (T, D)."""
        return _rms_norm(x_TD, self._layers[layer].mlp_norm_D, self.config.rms_norm_eps)

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` has routed experts (else ``dense_mlp``)."""
        return self.config.is_moe(layer)

    def dense_mlp(self, layer: int, h_TD: torch.Tensor) -> torch.Tensor:
        """The MLP of a layer without experts, (T, D), without the residual."""
        mlp = self._layers[layer].mlp
        if isinstance(mlp, _Moe):
            raise ModelError(f"layer {layer} has routed experts; call route, experts and shared_experts")
        return _gated(mlp, h_TD)

    def shared_experts(self, layer: int, h_TD: torch.Tensor) -> torch.Tensor:
        """The experts that every token passes, (T, D), without the residual."""
        return _gated(self._moe(layer).shared, h_TD)

    def route(self, layer: int, h_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which experts (int64 (T, K)) each token goes to, and their weights (float32 (T, K))."""
        config = self.config
        scores_TX = F.linear(h_TD.float(), self._moe(layer).router_XD).softmax(dim=-1)
        if config.topk_method == "group_limited_greedy" and config.n_group and config.topk_group:
            scores_TGX = scores_TX.view(
                -1, config.n_group, config.n_routed_experts // config.n_group
            )  # G groups of X / G experts
            best_TG = scores_TGX.amax(dim=-1)
            chosen = best_TG.topk(config.topk_group, dim=-1).indices
            kept_TG = torch.zeros_like(best_TG).scatter(1, chosen, 1.0)
            scores_TX = (scores_TGX * kept_TG.unsqueeze(-1)).flatten(1)
        weights_TK, ids_TK = scores_TX.topk(config.num_experts_per_tok, dim=-1)
        return ids_TK, weights_TK * config.routed_scaling_factor

    def experts(
        self, layer: int, h_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum over this rank's experts only, (T, D); summed over ranks it is the whole.

        All local experts see all tokens, and a token's weight for an expert it was not routed to is zero:
        more arithmetic than gathering tokens, but shapes do not depend on the routing.
        """
        routing_TL = ((ids_TK.unsqueeze(-1) == self._local_L) * weights_TK.unsqueeze(-1)).sum(dim=1)
        return _gated(self._moe(layer).routed, h_TD, routing_TL)

    def routed(self, ids_TK: torch.Tensor, valid_T1: torch.Tensor) -> torch.Tensor:
        """How many tokens each of this rank's experts got, int64 (L,). ``valid_T1``: 1.0 where there is a token."""
        hits_TL = (ids_TK.unsqueeze(-1) == self._local_L).sum(dim=1)
        return (hits_TL * valid_T1.to(torch.int64)).sum(dim=0)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Float32 logits (T, V) of the residual stream after the last layer."""
        return F.linear(_rms_norm(x_TD, self._norm_D, self.config.rms_norm_eps), self._head_VD).float()

    def _moe(self, layer: int) -> _Moe:
        mlp = self._layers[layer].mlp
        if isinstance(mlp, _Mlp):
            raise ModelError(f"layer {layer} has no routed experts; call dense_mlp")
        return mlp

    def _project(
        self, layer: int, x_TD: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries' unrotated and rotated parts, and the latents."""
        config, part = self.config, self._layers[layer].attention
        h_TD = _rms_norm(x_TD, self._layers[layer].attention_norm_D, config.rms_norm_eps)
        query_in = h_TD
        if part.query_down is not None and part.query_norm is not None:
            query_in = _rms_norm(F.linear(h_TD, part.query_down), part.query_norm, _LATENT_NORM_EPS)
        q_THQ = F.linear(query_in, part.query).view(-1, len(self.heads), config.qk_head_dim)
        q_nope_THN, q_rope_THP = torch.split(
            q_THQ, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
        )
        compressed_TR, k_rope_TP = torch.split(
            F.linear(h_TD, part.latent_CD), [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        cos_TF, sin_TF = rope.angles(positions_T, self._frequencies, self._rotation_scale)
        normed_TR = _rms_norm(compressed_TR, part.latent_norm_R, _LATENT_NORM_EPS)
        latent_TC = torch.cat((normed_TR, rope.rotate(k_rope_TP, cos_TF, sin_TF)), dim=-1)
        return q_nope_THN, rope.rotate(q_rope_THP, cos_TF.unsqueeze(1), sin_TF.unsqueeze(1)), latent_TC


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normed in float32, rounded to the type of ``x``, then weighted: transformers rounds in this order."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def _gated(mlp: _Mlp, h_TD: torch.Tensor, routing_TL: torch.Tensor | None = None) -> torch.Tensor:
    """One MLP, or several summed with the weights of ``routing_TL``."""
    gate, up = F.linear(h_TD, mlp.gate_up).chunk(2, dim=-1)
    inner = F.silu(gate) * up  # (T, L * I)
    if routing_TL is not None and routing_TL.shape[1]:
        # Weighting the inner values instead of the outputs makes the sum over experts part of one product.
        shares = inner.view(*routing_TL.shape, -1) * routing_TL.to(inner.dtype).unsqueeze(-1)
        inner = shares.flatten(1)
    return F.linear(inner, mlp.down)


class _Taker:
    """Takes tensors out of the weights by name, checking that each is there and has its shape."""

    def __init__(self, config: ModelConfig, experts: range, weights: Mapping[str, torch.Tensor]) -> None:
        self._shapes = tensor_shapes(config, experts)
        self._weights = weights

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            raise ModelError(
                f"weights have no tensor '{name}'; expected shape {list(self._shapes[name])}; load or make "
                "them with the same config and experts as the model"
            )
        tensor = self._weights[name]
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelError(
                f"tensor '{name}' has shape {list(tensor.shape)}; expected {list(self._shapes[name])}; load "
                "or make the weights with the config of the model"
            )
        return tensor

    def mlp(self, prefix: str) -> _Mlp:
        return self.mlps([prefix])

    def mlps(self, prefixes: list[str]) -> _Mlp:
        gates = [self(prefix + "gate_proj.weight") for prefix in prefixes]
        ups = [self(prefix + "up_proj.weight") for prefix in prefixes]
        downs = [self(prefix + "down_proj.weight") for prefix in prefixes]
        return _Mlp(gate_up=torch.cat(gates + ups), down=torch.cat(downs, dim=1))


def _layer(config: ModelConfig, experts: range, heads: range, index: int, take: _Taker) -> _Layer:
    prefix = f"model.layers.{index}."
    mlp: _Mlp | _Moe
    if config.is_moe(index):
        routed = [f"{prefix}mlp.experts.{expert}." for expert in experts]
        router_XD = take(prefix + "mlp.gate.weight").float()
        empty = _Mlp(
            gate_up=router_XD.new_empty((0, config.hidden_size)),
            down=router_XD.new_empty((config.hidden_size, 0)),
        )
        mlp = _Moe(
            router_XD=router_XD,
            shared=take.mlp(prefix + "mlp.shared_experts."),
            routed=take.mlps(routed) if routed else empty,
        )
    else:
        mlp = take.mlp(prefix + "mlp.")
    return _Layer(
        attention_norm_D=take(prefix + "input_layernorm.weight"),
        attention=_attention(config, heads, prefix + "self_attn.", take),
        mlp_norm_D=take(prefix + "post_attention_layernorm.weight"),
        mlp=mlp,
    )


def _attention(config: ModelConfig, heads: range, prefix: str, take: _Taker) -> _Attention:
    low_rank = config.q_lora_rank is not None
    count = config.num_attention_heads

    def of_heads(name: str) -> torch.Tensor:
        """Rows of a matrix that belong to this rank's heads, by head: (H, rows of a head, columns)."""
        whole = take(prefix + name)
        part = whole.view(count, -1, whole.shape[1])[heads.start : heads.stop]
        return part if len(heads) == count else part.clone()  # the others' rows are not kept

    query_HQD = of_heads("q_b_proj.weight" if low_rank else "q_proj.weight")
    up_HWR = of_heads("kv_b_proj.weight")  # W = N + U, the keys first
    key_up_HNR, value_up_HUR = torch.split(up_HWR, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
    out_DV = take(prefix + "o_proj.weight")
    if len(heads) < count:
        width = config.v_head_dim
        out_DV = out_DV[:, heads.start * width : heads.stop * width].contiguous()
    return _Attention(
        query=query_HQD.flatten(0, 1),
        query_down=take(prefix + "q_a_proj.weight") if low_rank else None,
        query_norm=take(prefix + "q_a_layernorm.weight") if low_rank else None,
        latent_CD=take(prefix + "kv_a_proj_with_mqa.weight"),
        latent_norm_R=take(prefix + "kv_a_layernorm.weight"),
        key_up_HNR=key_up_HNR.contiguous(),
        value_up_HRU=value_up_HUR.transpose(1, 2).contiguous(),
        out=out_DV,
    )
