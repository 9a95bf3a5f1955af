"""One forward pass as stream operations: what is enqueued, in which order, on which buffers.

The same enqueues serve an eager step and a graph capture; the device decides whether they queue or record. A
``Workspace`` holds the buffers of one shape: made afresh for an eager step, kept for ever by a captured graph.
Shapes: T tokens of this rank, B sequences, S sampled rows, G gathered rows, D hidden size, V values of
all heads, W attention groups.

Not here: when a step runs and with which batch (``engine.py``); the arithmetic (``deepseek_v2.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness import faults
from harness.devices.base import Device, ExternalEvent, Graph, HostArgs
from serving.comm import Comm, Group
from serving.deepseek_v2 import DeepseekV2
from serving.dp_attention import StepPlan, gather, scatter, valid_rows
from serving.weights import even_share


def zeroed(device: Device, *tensors: torch.Tensor) -> None:
    """Enqueues zeros into them, on the stream that uses them first: what is written beside it may come later."""

    def zero() -> None:
        for tensor in tensors:
            tensor.zero_()

    device.compute.run(zero, "zero")


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Device memory that lives as long as the engine. Row 0 and slot 0 are where padding goes."""

    kv: tuple[torch.Tensor, ...]
    """Per layer (slots, kv_lora_rank + rope): the compressed cache."""
    table_RM: torch.Tensor
    """Slot of each position of each running request, int64."""
    last_token_R: torch.Tensor
    """The newest sampled token of each running request, int64: the next step's input."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a pass does beyond the model's arithmetic. Fixed for an engine."""

    stats: bool = False
    """The ranks add up how many tokens each expert got."""
    stats_group: str = "stats"
    stats_joined: bool = False
    """The data path waits for that sum: where a graph holds collectives of the same communicator, nothing else
    orders the two."""
    output_parallel: bool = False
    """The output projection is spread over all ranks, each of which is its own attention group."""


PLAIN = Features()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers of one forward pass. ``packed`` is what one copy brings; the int64 views below lie in it."""

    plan: StepPlan
    packed: torch.Tensor
    ids_T: torch.Tensor  # a token id, or minus the row whose newest token it is
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    rows_T: torch.Tensor
    rows_B: torch.Tensor
    sample_S: torch.Tensor  # index into T
    sample_rows_S: torch.Tensor
    prefix_P: torch.Tensor  # (3, P): row, position, slot of cached tokens
    counts_W: torch.Tensor
    valid_G1: torch.Tensor
    hidden_TD: torch.Tensor
    query_THE: torch.Tensor
    attended_THC: torch.Tensor
    values_in: torch.Tensor  # (local rows, V); V is 0 unless the output projection is spread over the ranks
    values_GV: torch.Tensor  # attended values of all heads
    experts_in: torch.Tensor  # (local rows, D)
    gathered_GD: torch.Tensor
    partial_GD: torch.Tensor
    reduced: torch.Tensor  # (local rows, D)
    logits_SV: torch.Tensor
    routed_X: (
        torch.Tensor
    )  # int64: tokens that each of this rank's experts got in this pass; empty without stats

    @staticmethod
    def make(
        device: Device,
        model: DeepseekV2,
        plan: StepPlan,
        dp_rank: int,
        *,
        sizes: tuple[int, int, int, int],
        features: Features = PLAIN,
    ) -> Workspace:
        """``sizes``: T, B, S and P (cached tokens whose slots are new to the device)."""
        tokens, sequences, samples, prefix = sizes
        config = model.config
        parts = [tokens, tokens, tokens, tokens, sequences, samples, samples, 3 * prefix]
        packed = device.empty((sum(parts),), torch.int64)
        ids, positions, slots, rows, rows_b, sample, sample_rows, prefix_flat = torch.split(packed, parts)
        floats = model.dtype
        hidden, heads, rank_c = config.hidden_size, len(model.heads), config.kv_lora_rank
        values = heads * config.v_head_dim if features.output_parallel else 0
        local = plan.local_rows(dp_rank)
        return Workspace(
            plan=plan,
            packed=packed,
            ids_T=ids,
            positions_T=positions,
            slots_T=slots,
            rows_T=rows,
            rows_B=rows_b,
            sample_S=sample,
            sample_rows_S=sample_rows,
            prefix_P=prefix_flat.view(3, prefix),
            counts_W=device.empty((len(plan.tokens),), torch.int64),
            valid_G1=device.empty((plan.rows, 1), torch.float32),
            hidden_TD=device.empty((tokens, hidden), floats),
            query_THE=device.empty((tokens, heads, rank_c + config.qk_rope_head_dim), floats),
            attended_THC=device.empty((tokens, heads, rank_c), floats),
            values_in=device.empty((local, values), floats),
            values_GV=device.empty((plan.rows, values), floats),
            experts_in=device.empty((local, hidden), floats),
            gathered_GD=device.empty((plan.rows, hidden), floats),
            partial_GD=device.empty((plan.rows, hidden), floats),
            reduced=device.empty((local, hidden), floats),
            logits_SV=device.empty((samples, config.vocab_size), torch.float32),
            routed_X=device.empty((config.n_routed_experts if features.stats else 0,), torch.int64),
        )


class Forward:
    """Enqueues forward passes of one rank."""

    def __init__(
        self,
        model: DeepseekV2,
        device: Device,
        comm: Comm,
        state: DeviceState,
        features: Features = PLAIN,
    ) -> None:
        self._model = model
        self._device = device
        self._comm = comm
        self._experts = comm.group("experts")
        self._state = state
        self._topology = comm.topology
        self._attention_group = comm.group("attention") if comm.topology.attention_size > 1 else None
        self._spread = comm.group("output") if features.output_parallel else None
        self._stats = comm.group(features.stats_group) if features.stats else None
        self._stats_joined = features.stats_joined
        self._total_X = device.empty((model.config.n_routed_experts,), torch.int64)
        zeroed(device, self._total_X)
        self._last_moe = max(filter(model.is_moe, range(model.config.num_hidden_layers)), default=None)

    def capture(self, ws: Workspace, name: str) -> Graph:
        """The pass as a graph. Each attention layer of each graph has an external event of its own."""
        layers = range(self._model.config.num_hidden_layers)
        events = [self._device.external_event(f"{name} attention.{layer}") for layer in layers]
        sequences = len(ws.rows_B)
        self._comm.capture_begins()
        with self._device.capture(name) as graph:
            self.enqueue(ws, ((0,) * sequences, (1,) * sequences), events)
        self._comm.capture_ended(graph)
        return graph

    def enqueue(self, ws: Workspace, args: HostArgs, events: Sequence[ExternalEvent] | None = None) -> None:
        """One pass over all layers. ``args``: key lengths and query lengths of the B sequences, by value.

        ``events``: of the attention layers, in a capture.
        """
        own = ws.hidden_TD.shape[0] > 0
        eager = events is None
        self._device.compute.run(lambda: self._begin(ws), "embed")
        for layer in range(self._model.config.num_hidden_layers):
            attends = own or self._spread is not None
            if attends and not (eager and self._left_out(ws, layer, "attention")):
                self._attention(ws, layer, args, None if events is None else events[layer])
            if not (eager and self._left_out(ws, layer, "experts" if self._model.is_moe(layer) else "mlp")):
                self._mlp(ws, layer, own)
        if ws.sample_S.shape[0] > 0:
            self._device.compute.run(lambda: self._logits(ws), "logits")

    def add_up(self, ws: Workspace) -> None:
        """Enqueues the sum over ranks of the pass's ``routed_X``. The data path does not wait for it. An eager pass
        does this itself, beside the experts' collectives; after a replay the caller does."""
        if self._stats is None:
            return
        counts_X = self._device.empty(tuple(ws.routed_X.shape), torch.int64)

        def take() -> None:
            counts_X.copy_(ws.routed_X)

        def add() -> None:
            self._total_X.add_(counts_X)

        self._device.compute.run(take, "expert_counts")
        self._stats.all_reduce(counts_X, join=self._stats_joined)
        self._device.comm.run(add, "expert_totals")

    def routed_tokens(self) -> list[int]:
        """Tokens of all passes that each expert got on all ranks; zeros without ``stats``. Call it when ``comm`` is
        drained."""
        total: list[int] = self._total_X.tolist()
        return total

    def _left_out(self, ws: Workspace, layer: int, part: str) -> bool:
        """Whether a fault leaves out one part of a layer in an eager step."""
        if faults.ACTIVE is None:
            return False
        tokens = ws.hidden_TD.shape[0]
        idle = ws.plan.tokens[self._topology.dp_rank] == 0
        return faults.ACTIVE.visit("rank.layer", part=part, layer=layer, tokens=tokens, idle=idle).skipped

    def host_args(self, args: HostArgs) -> Sequence[HostArgs]:
        """The host arguments of a captured pass: the same lengths for every layer."""
        return [args] * self._model.config.num_hidden_layers

    def _begin(self, ws: Workspace) -> None:
        state = self._state
        if self._stats is not None:
            ws.routed_X.zero_()
        ws.valid_G1.copy_(valid_rows(ws.counts_W, ws.plan))
        if ws.prefix_P.shape[1] > 0:
            state.table_RM.index_put_((ws.prefix_P[0], ws.prefix_P[1]), ws.prefix_P[2])
        if ws.hidden_TD.shape[0] == 0:
            return
        state.table_RM.index_put_((ws.rows_T, ws.positions_T), ws.slots_T)
        newest_T = state.last_token_R.index_select(0, (-ws.ids_T).clamp_min(0))
        ids_T = torch.where(ws.ids_T >= 0, ws.ids_T, newest_T)
        ws.hidden_TD.copy_(self._model.embed(ids_T))

    def _attention(self, ws: Workspace, layer: int, args: HostArgs, event: ExternalEvent | None) -> None:
        model, kv_SC = self._model, self._state.kv[layer]

        def project() -> None:
            query_THE, latent_TC = model.project(layer, ws.hidden_TD, ws.positions_T)
            kv_SC.index_copy_(0, ws.slots_T, latent_TC)
            ws.query_THE.copy_(query_THE)

        def attend(lengths: HostArgs) -> None:
            kv_lens, q_lens = lengths
            table_BM = self._state.table_RM.index_select(0, ws.rows_B)
            ws.attended_THC.copy_(model.attend(ws.query_THE, kv_SC, table_BM, kv_lens, q_lens))

        if ws.hidden_TD.shape[0] > 0:
            self._device.compute.run(project, f"project.{layer}")
            self._device.host_op(attend, args, event, f"attention.{layer}")
        if self._spread is not None:
            self._output_over_ranks(ws, layer, self._spread)
        else:
            self._output(ws, layer)

    def _output(self, ws: Workspace, layer: int) -> None:
        """The attended values back into the residual stream."""
        model, group = self._model, self._attention_group

        def whole() -> None:
            ws.hidden_TD.copy_(model.output(layer, ws.attended_THC, ws.hidden_TD))

        if group is None:
            self._device.compute.run(whole, f"output.{layer}")
            return
        part_TD = self._device.empty(tuple(ws.hidden_TD.shape), model.dtype)

        def part() -> None:
            part_TD.copy_(model.output_part(layer, ws.attended_THC))

        def add() -> None:
            ws.hidden_TD.add_(part_TD)

        self._device.compute.run(part, f"output.{layer}")
        group.all_reduce(part_TD)
        self._device.compute.run(add, f"output_sum.{layer}")

    def _output_over_ranks(self, ws: Workspace, layer: int, group: Group) -> None:
        """As vllm-ascend's tensor-parallel output projection under data parallelism: the attended values of all
        ranks come together, each rank multiplies its share of every value, and the sums go back."""
        model, tokens = self._model, ws.hidden_TD.shape[0]
        columns = even_share(ws.values_GV.shape[1], self._topology.rank, self._topology.world)

        def bring() -> None:
            values_TV = model.values(layer, ws.attended_THC) if tokens else None
            self._place(ws, values_TV, ws.values_in, ws.values_GV)

        def multiply() -> None:
            ws.partial_GD.copy_(model.output_share(layer, ws.values_GV, columns))

        def add() -> None:
            ws.hidden_TD.add_(self._returned(ws))

        self._device.compute.run(bring, f"output_in.{layer}")
        gather(group, ws.plan, ws.values_in, ws.values_GV)
        self._device.compute.run(multiply, f"output.{layer}")
        scatter(group, ws.plan, ws.partial_GD, ws.reduced)
        if tokens:
            self._device.compute.run(add, f"output_sum.{layer}")

    def _mlp(self, ws: Workspace, layer: int, own: bool) -> None:
        model = self._model
        if not model.is_moe(layer):
            if own:
                self._device.compute.run(lambda: self._dense(ws, layer), f"mlp.{layer}")
            return
        self._device.compute.run(lambda: self._to_experts(ws, layer), f"experts_in.{layer}")
        gather(self._experts, ws.plan, ws.experts_in, ws.gathered_GD)
        self._device.compute.run(lambda: self._route(ws, layer), f"experts.{layer}")
        scatter(self._experts, ws.plan, ws.partial_GD, ws.reduced)
        if layer == self._last_moe and not self._device.capturing:
            self.add_up(ws)
        if own:
            self._device.compute.run(lambda: self._from_experts(ws, layer), f"experts_out.{layer}")

    def _dense(self, ws: Workspace, layer: int) -> None:
        ws.hidden_TD.add_(self._model.dense_mlp(layer, self._model.mlp_input(layer, ws.hidden_TD)))

    def _to_experts(self, ws: Workspace, layer: int) -> None:
        """Puts this rank's tokens where ``gather`` takes them from. Of an attention group one rank brings them."""
        brings = ws.hidden_TD.shape[0] > 0 and self._topology.member == 0
        own_TD = self._model.mlp_input(layer, ws.hidden_TD) if brings else None
        self._place(ws, own_TD, ws.experts_in, ws.gathered_GD)

    def _place(
        self, ws: Workspace, own: torch.Tensor | None, local: torch.Tensor, gathered: torch.Tensor
    ) -> None:
        """Puts a rank's rows (None: it brings none) where ``gather`` takes them from, and zeros around them."""
        tokens = 0 if own is None else own.shape[0]
        target, begin = (gathered, ws.plan.begin(self._topology.dp_rank)) if ws.plan.summed else (local, 0)
        if target.shape[0] > tokens:
            target.zero_()
        if own is not None:
            target[begin : begin + tokens].copy_(own)

    def _returned(self, ws: Workspace) -> torch.Tensor:
        """This rank's rows of what ``scatter`` brought back."""
        tokens = ws.hidden_TD.shape[0]
        if not ws.plan.summed:
            return ws.reduced[:tokens]
        begin = ws.plan.begin(self._topology.dp_rank)
        return ws.partial_GD[begin : begin + tokens]

    def _route(self, ws: Workspace, layer: int) -> None:
        ids_GK, weights_GK = self._model.route(layer, ws.gathered_GD)
        partial_GD = self._model.experts(layer, ws.gathered_GD, ids_GK, weights_GK)
        ws.partial_GD.copy_(partial_GD * ws.valid_G1)
        if self._stats is not None:
            own = self._model.experts_owned
            ws.routed_X[own.start : own.stop].add_(self._model.routed(ids_GK, ws.valid_G1))

    def _from_experts(self, ws: Workspace, layer: int) -> None:
        shared_TD = self._model.shared_experts(layer, self._model.mlp_input(layer, ws.hidden_TD))
        ws.hidden_TD.add_(self._returned(ws)).add_(shared_TD)

    def _logits(self, ws: Workspace) -> None:
        ws.logits_SV.copy_(self._model.logits(ws.hidden_TD.index_select(0, ws.sample_S)))
