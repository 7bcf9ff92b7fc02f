"""Tests of gated_delta_jit: `pytest test_gated_delta.py`.

The CPU half always runs; the CUDA half runs where there is a CUDA device and says so where there is none. Results are
held against `gated_delta_reference` in float64, fed with the same rounded inputs, by the bars of the one table below.
The file goes from mathematics (sizes, types, gates, states) over memory (strides, poison, far offsets) and calls
(errors, operator, streams, graphs) to build and import, which run in processes and a cache of their own.

Nearly every call goes through `run`, which poisons free memory first and afterwards checks that the inputs are
unchanged and that the results are new, contiguous, and of the right shape and type. Gradients, when they come, can use
the same `make_problem` and `check_close`: the reference is differentiable, its float64 gradients are their oracle.
"""

import contextlib
import copy
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

import gated_delta_jit
from gated_delta_jit import OPERATOR, ModelNew, gated_delta
from reference import Model, gated_delta_reference, get_init_inputs, get_inputs


class Bar(NamedTuple):
    """How far a result of one dtype may be from the float64 oracle on the same rounded inputs.

    Two conditions hold at once. Whole tensor: norm(error) <= norm * norm(oracle). Every element:
    |error| <= rounding * |oracle| + arithmetic * (sum of the absolute values of all its terms) + floor.
    """

    norm: float
    rounding: float
    arithmetic: float
    floor: float


TOLERANCE = {
    # dtype of the result       norm    rounding  arithmetic   floor (half a subnormal step)
    torch.float64: Bar(1e-14, 2**-53, 16 * 2**-53, 0.0),
    torch.float32: Bar(3e-7, 2**-24, 8 * 2**-24, 0.0),
    torch.float16: Bar(1e-3, 2**-11, 8 * 2**-24, 2**-24),
    torch.bfloat16: Bar(2.5e-3, 2**-8, 8 * 2**-24, 0.0),
}

DTYPES = list(TOLERANCE)
HALVES = [torch.float16, torch.bfloat16]
STEPS = [1, 15, 17, 63, 64, 65, 127, 128, 300, 512, 1000]
WIDTHS = [1, 7, 16, 20, 24, 32, 60, 64, 100, 128, 130, 257]
UNEQUAL_WIDTHS = [(1, 130), (130, 1), (7, 64), (64, 7), (24, 20), (60, 16), (257, 3), (16, 128), (128, 32), (20, 100)]
SEED_SHAPE = (2, 128, 4, 24, 24)
RAGGED_SHAPE = (1, 65, 3, 20, 60)

SOURCE_PATH = Path(gated_delta_jit.__file__).resolve()
SOURCE = SOURCE_PATH.read_text()


def _why_no_cuda() -> str:
    """Reason to skip the CUDA half, empty when it can run."""
    if not torch.cuda.is_available():
        return "no CUDA device: the CUDA half of this test did NOT run"
    if not gated_delta_jit.HAS_CUDA:
        return "gated_delta_jit was built without its CUDA part: the CUDA half of this test did NOT run"
    return ""


WHY_NO_CUDA = _why_no_cuda()
needs_cuda = pytest.mark.skipif(bool(WHY_NO_CUDA), reason=WHY_NO_CUDA)
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def each_dtype(dtypes: list[torch.dtype]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", dtypes, ids=dtype_name)


# ---------------------------------------------------------------------------------------------------------------------
# Problems, oracle, checks
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """The arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    initial_state: Tensor | None = None
    scale: float = 1.0
    output_final_state: bool = False
    log_gate: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        B, T, H, K = self.q.shape
        return B, T, H, K, self.v.shape[-1]

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def tensors(self) -> dict[str, Tensor]:
        names = ("q", "k", "v", "gate", "initial_state")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def options(self) -> dict[str, Any]:
        names = ("initial_state", "scale", "output_final_state", "log_gate")
        return {name: getattr(self, name) for name in names}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Problem":
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})

    def steps(self, start: int, stop: int) -> "Problem":
        """The same problem between two points of time; the state does not follow."""
        cut = {name: getattr(self, name)[:, start:stop] for name in ("q", "k", "v", "gate")}
        return replace(self, initial_state=None, **cut)

    def batch(self, b: int) -> "Problem":
        return self.map(lambda tensor: tensor[b : b + 1])

    def call(self) -> tuple[Tensor, Tensor | None]:
        return gated_delta(self.q, self.k, self.v, self.gate, **self.options())

    def operator_arguments(self) -> tuple[Any, ...]:
        flags = (self.scale, self.output_final_state, self.log_gate)
        return (self.q, self.k, self.v, self.gate, self.initial_state, *flags)


def _see_saw(noise: Tensor) -> Tensor:
    """1e-15 and 1e15 in turns: every product of consecutive gates stays between 1e-15 and 1e15."""
    gate = torch.full_like(noise, 1e-15)
    gate[:, 1::2] = 1e15
    return gate


# Functions of standard normal noise of the gate's shape. Products of consecutive gates stay below about 1e15.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "normal": lambda noise: noise,
    "ten percent zeros": lambda noise: torch.sigmoid(noise) * (noise.roll(1, 1).abs() > 0.1257),
    "all zero": torch.zeros_like,
    "1e-30": lambda noise: torch.full_like(noise, 1e-30),
    "around 1e-20": lambda noise: 1e-20 * torch.exp(noise),
    "negative": lambda noise: -torch.sigmoid(noise),
    "exactly one": torch.ones_like,
    "minus one": lambda noise: -torch.ones_like(noise),
    "above one": lambda noise: 1.0 + 0.01 * torch.sigmoid(noise),
    "see-saw": _see_saw,
}
# Here nothing is ever forgotten, and a float32 loop is itself off by 3e-7 after 128 steps; a product of equal gates
# rounds the same way every time. These are tested on a part of the steps.
UNDIMINISHED = {"exactly one": 2, "minus one": 2, "above one": 2, "see-saw": 4}


def make_problem(
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    gate: str = "sigmoid",
    gate_dtype: torch.dtype | None = None,
    gate_shape: tuple[int, int, int, int] | None = None,
    state: bool = False,
    scale: float = 1.0,
    output_final_state: bool = True,
    log_gate: bool = False,
    seed: int = 0,
) -> Problem:
    """Normal q, k, v and state, and a gate of the named kind; the same arguments give the same numbers everywhere."""
    B, T, H, K, V = sizes
    generator = torch.Generator().manual_seed(zlib.crc32(repr((sizes, gate, gate_shape, seed)).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (normal(B, T, H, width).to(dtype) for width in (K, K, V))
    gate_values = GATES[gate](normal(*(gate_shape or (B, T, H, V))))
    if log_gate:
        gate_values = gate_values.log()
    initial_state = normal(B, H, K, V).to(state_dtype) if state else None
    problem = Problem(q, k, v, gate_values.to(gate_dtype or dtype), initial_state, scale, output_final_state, log_gate)
    return problem.map(lambda tensor: tensor.to(device))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small steps in a Python loop are slower on several CPU threads, much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def oracle(problem: Problem) -> tuple[Tensor, Tensor]:
    """(y, final state) of the reference in float64 on the same, rounded, inputs."""
    exact = problem.map(lambda tensor: tensor.double())
    options = {**exact.options(), "output_final_state": True}
    with one_thread():
        return gated_delta_reference(exact.q, exact.k, exact.v, exact.gate, **options)


def term_sums(problem: Problem) -> tuple[Tensor, Tensor]:
    """For every element of (y, final state) the sum of the absolute values of its terms, the scale of rounding."""
    exact = problem.map(lambda tensor: tensor.double())
    if exact.log_gate:
        exact = replace(exact, gate=exact.gate.exp())
    return oracle(replace(exact.map(torch.abs), scale=abs(exact.scale), log_gate=False))


def check_close(what: str, got: Tensor, want: Tensor, terms: Tensor) -> None:
    """Holds `got` against the float64 `want` by both bars of the tolerance table."""
    bar = TOLERANCE[got.dtype]
    assert got.shape == want.shape, what
    assert torch.isfinite(got).all(), f"{what}: {int((~torch.isfinite(got)).sum())} of {got.numel()} are not finite"
    error = (got.double() - want).abs()
    size = want.norm().item()
    wrong = error.norm().item()
    assert wrong <= bar.norm * size, f"{what}: error {wrong / (size or 1.0):.2e} of the norm, bar {bar.norm}"
    excess = error - (bar.rounding * want.abs() + bar.arithmetic * terms + bar.floor)
    if excess.numel() and excess.max().item() > 0:
        flat = int(excess.argmax())
        where = [int(index) for index in torch.unravel_index(torch.tensor(flat), excess.shape)]
        pytest.fail(f"{what}{where}: got {got.flatten()[flat].item()!r}, want {want.flatten()[flat].item()!r}")


def check(problem: Problem, y: Tensor, state: Tensor | None) -> None:
    """Holds the results of `problem` against the oracle."""
    want_y, want_state = oracle(problem)
    terms_y, terms_state = term_sums(problem)
    check_close("y", y, want_y, terms_y)
    if state is not None:
        check_close("final_state", state, want_state, terms_state)


def poison(device: str | torch.device, sizes_in_bytes: list[int]) -> None:
    """Leaves NaN in free memory of these sizes, so that an element that is never written shows up as NaN."""
    options = {"dtype": torch.bfloat16, "device": device}
    blocks = [torch.full((max(size // 2, 1),), torch.nan, **options) for size in sizes_in_bytes]
    del blocks


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors live in one storage, meta and fake tensors included."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def check_form(problem: Problem, y: Tensor, state: Tensor | None) -> None:
    """Shape, dtype, device and contiguity of the results; they are new memory and carry no autograd graph."""
    B, T, H, K, V = problem.sizes
    assert (y.shape, y.dtype, y.device) == ((B, T, H, V), problem.q.dtype, problem.q.device)
    assert y.is_contiguous()
    assert not y.requires_grad
    for name, tensor in problem.tensors().items():
        assert not share_memory(y, tensor), f"y lies in the memory of {name}"
    assert (state is not None) == problem.output_final_state
    if state is None:
        return
    assert (state.shape, state.dtype, state.device) == ((B, H, K, V), problem.state_dtype, problem.q.device)
    assert state.is_contiguous()
    assert not state.requires_grad
    for name, tensor in problem.tensors().items():
        assert not share_memory(state, tensor), f"final_state lies in the memory of {name}"


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """One call in poisoned memory; checks everything about it but the numbers."""
    B, T, H, K, V = problem.sizes
    y_bytes = B * T * H * V * problem.q.element_size()
    state_bytes = B * H * K * V * (8 if problem.q.dtype == torch.float64 else 4)
    before = {name: (tensor.clone(), tensor._version) for name, tensor in problem.tensors().items()}
    poison(problem.q.device, [y_bytes, state_bytes, y_bytes + state_bytes, 2 * state_bytes])
    y, state = problem.call()
    for name, tensor in problem.tensors().items():
        values, version = before[name]
        assert tensor._version == version, f"{name} was written to"
        assert torch.equal(tensor, values), f"{name} was changed"
    check_form(problem, y, state)
    return y, state


def run_and_check(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """One call, checked in form and numbers."""
    y, state = run(problem)
    check(problem, y, state)
    return y, state


# ---------------------------------------------------------------------------------------------------------------------
# The oracle and the drop-in
# ---------------------------------------------------------------------------------------------------------------------


def test_oracle_by_hand() -> None:
    """The oracle itself, on numbers that can be followed by hand: y reads the state after the update."""
    q, k, v = (torch.tensor(values, dtype=torch.float64).view(1, 2, 1, 1) for values in ([1, 2], [3, 5], [7, 11]))
    gate = torch.tensor([0.5, -2.0], dtype=torch.float64).view(1, 2, 1, 1)
    start = torch.full((1, 1, 1, 1), 4.0, dtype=torch.float64)
    y, state = gated_delta_reference(q, k, v, gate, scale=0.5, initial_state=start, output_final_state=True)
    assert y.flatten().tolist() == [0.5 * (0.5 * 4 + 21), 0.5 * 2 * (-2 * 23 + 55)]
    assert state.item() == -2 * 23 + 55


@on_every_device
@each_dtype([torch.float32, torch.float16, torch.bfloat16])
def test_drop_in(device: str, dtype: torch.dtype) -> None:
    """ModelNew in KernelBench's way: against Model, with KernelBench's tolerance, and by our own bars."""
    torch.manual_seed(0)
    inputs = [tensor.to(device, dtype) for tensor in get_inputs()]
    want = Model(*get_init_inputs()).to(device)(*inputs)
    got = ModelNew(*get_init_inputs()).to(device, dtype)(*inputs)
    assert type(got) is Tensor
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert torch.allclose(got, want, atol=tolerance, rtol=tolerance)
    check(Problem(*inputs), got, None)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and types
# ---------------------------------------------------------------------------------------------------------------------


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("T", STEPS)
def test_steps(device: str, dtype: torch.dtype, T: int) -> None:
    """Ragged lengths: a chunk, warp or tile that is not full at the end."""
    run_and_check(make_problem((2, T, 3, 24, 24), dtype, device, state=True))


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(device: str, dtype: torch.dtype, width: int) -> None:
    """K = V of every kind: no multiple-of-anything demand, no largest size."""
    run_and_check(make_problem((2, 37, 2, width, width), dtype, device, state=True))


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize(("K", "V"), UNEQUAL_WIDTHS)
def test_unequal_widths(device: str, dtype: torch.dtype, K: int, V: int) -> None:
    """K differs from V: catches the two exchanged anywhere."""
    run_and_check(make_problem((1, 50, 3, K, V), dtype, device, state=True))


@on_every_device
@pytest.mark.parametrize("T", [1, 31, 33, 130])
@pytest.mark.parametrize("width", [1, 17, 31, 33, 63, 65, 96, 127, 129, 256])
def test_steps_by_widths(device: str, T: int, width: int) -> None:
    """Ragged in time and in width at once."""
    run_and_check(make_problem((1, T, 2, width, width), torch.float32, device))


@on_every_device
@pytest.mark.parametrize("seed", range(40))
def test_random_problems(device: str, seed: int) -> None:
    """Sizes, types and options that nobody thought of, all drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    B, T, H, K, V = draw(1, 4), draw(1, 200), draw(1, 5), draw(1, 140), draw(1, 140)
    dtype = DTYPES[draw(0, 3)]
    gate_shape = tuple(1 if draw(0, 3) == 0 else size for size in (B, T, H, V))
    run_and_check(
        make_problem(
            (B, T, H, K, V),
            dtype,
            device,
            gate_dtype=torch.float32 if dtype in HALVES and draw(0, 1) else dtype,
            gate_shape=gate_shape,
            state=bool(draw(0, 1)),
            scale=(1.0, 0.125, -1.5)[draw(0, 2)],
            output_final_state=bool(draw(0, 1)),
            log_gate=bool(draw(0, 1)),
            seed=seed,
        )
    )


@on_every_device
@each_dtype(HALVES)
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE, (1, 128, 2, 64, 64)], ids=str)
def test_float32_gate_beside_half(device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """A gate near 1 that half precision cannot hold; rounding it to half moves the result by far more than the bar."""
    problem = make_problem(sizes, dtype, device, gate_dtype=torch.float32, state=True)
    problem = replace(problem, gate=0.99 + 0.0099 * problem.gate)
    rounded = replace(problem, gate=problem.gate.to(dtype))
    shift = (oracle(rounded)[1] - oracle(problem)[1]).norm() / oracle(problem)[1].norm()
    assert shift > 10 * TOLERANCE[torch.float32].norm
    run_and_check(problem)


# ---------------------------------------------------------------------------------------------------------------------
# Gates
# ---------------------------------------------------------------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE], ids=str)
@pytest.mark.parametrize("gate", GATES)
@each_dtype(DTYPES)
def test_gates(device: str, dtype: torch.dtype, gate: str, sizes: tuple[int, ...]) -> None:
    """Gates are plain numbers: a log, a quotient of products or a clamp anywhere shows here."""
    if gate == "see-saw" and dtype == torch.float16:
        pytest.skip("the see-saw's results of 1e15 are no float16 numbers")
    gate_dtype = torch.float32 if dtype in HALVES else dtype
    B, T, H, K, V = sizes
    sizes = (B, T // UNDIMINISHED.get(gate, 1), H, K, V)
    run_and_check(make_problem(sizes, dtype, device, gate=gate, gate_dtype=gate_dtype, state=True))


@on_every_device
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE], ids=str)
def test_zero_gate_forgets(device: str, sizes: tuple[int, ...]) -> None:
    """What lies before a zero gate has no influence, to the bit, even when it is 1e25."""
    t = 37
    first = make_problem(sizes, device=device, state=True)
    first.gate[:, t] = 0
    second = replace(first, v=first.v.clone(), initial_state=-3 * first.initial_state)
    second.v[:, :t] = -1e25 * second.v[:, :t]
    y_first, state_first = run(first)
    y_second, state_second = run(second)
    assert not torch.equal(y_first[:, :t], y_second[:, :t])
    assert torch.equal(y_first[:, t:], y_second[:, t:])
    assert torch.equal(state_first, state_second)


@on_every_device
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE], ids=str)
@pytest.mark.parametrize("t", [1, 37, 64])
@pytest.mark.parametrize(("tiny", "large"), [(1e-30, 1e25), (1e-20, 1e15), (-1e-20, 1e15)])
def test_tiny_gate_is_no_zero(device: str, tiny: float, large: float, t: int, sizes: tuple[int, ...]) -> None:
    """One tiny gate after large values: what it lets through decides the result, so a clamp at 1e-20 shows."""
    problem = make_problem(sizes, device=device, state=True)
    problem.initial_state.mul_(large)
    problem.v[:, :t] *= large
    problem.v[:, t:] *= 1e-5
    problem.gate[:, t] *= tiny
    y, state = run(problem)
    want_y, want_state = oracle(problem)
    terms_y, terms_state = term_sums(problem)
    check_close("y before", y[:, :t], want_y[:, :t], terms_y[:, :t])
    check_close("y after", y[:, t:], want_y[:, t:], terms_y[:, t:])
    check_close("final_state", state, want_state, terms_state)


@on_every_device
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE, (2, 40, 2, 7, 7)], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "gate"])
def test_nan_goes_only_where_it_must(device: str, name: str, sizes: tuple[int, ...]) -> None:
    """A NaN reaches exactly the outputs that it reaches in the loop: no earlier step, no other head or column.

    Catches parts masked by multiplication with 0 instead of being left out.
    """
    problem = make_problem(sizes, device=device)
    getattr(problem, name)[0, 21, 1, 3] = torch.nan
    y, state = problem.call()
    want_y, want_state = oracle(problem)
    assert want_y.isnan().any() and not want_y.isnan().all()
    assert torch.equal(y.isnan(), want_y.isnan())
    assert torch.equal(state.isnan(), want_state.isnan())


# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE], ids=str)
@pytest.mark.parametrize("scale", [0.125, -1.5, 0.0, 2], ids=str)
def test_scale(device: str, dtype: torch.dtype, sizes: tuple[int, ...], scale: float) -> None:
    """scale multiplies y and leaves the state alone."""
    run_and_check(make_problem(sizes, dtype, device, scale=scale, state=True))


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE], ids=str)
def test_log_gate(device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """log_gate=True takes natural logs; minus infinity is the gate 0."""
    problem = make_problem(sizes, dtype, device, log_gate=True, state=True)
    problem.gate[:, 30:32] = -torch.inf
    run_and_check(problem)


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("output_final_state", [False, True], ids=["y alone", "final state"])
@pytest.mark.parametrize("state", [False, True], ids=["from zero", "initial state"])
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE, (2, 1, 3, 16, 16)], ids=str)
def test_states(device: str, dtype: torch.dtype, output_final_state: bool, state: bool, sizes: tuple[int, ...]) -> None:
    """Initial and final state, each alone and together; y must not depend on whether the final state is wanted."""
    problem = make_problem(sizes, dtype, device, state=state, output_final_state=output_final_state)
    y, _ = run_and_check(problem)
    other_y, _ = run(replace(problem, output_final_state=not output_final_state))
    assert torch.equal(y, other_y)


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("cut", [1, 31, 64, 127])
def test_two_halves_equal_one_whole(device: str, dtype: torch.dtype, cut: int) -> None:
    """The final state of the first part is the initial state of the second: held against the oracle of the whole."""
    whole = make_problem(SEED_SHAPE, dtype, device, state=True)
    first = replace(whole.steps(0, cut), initial_state=whole.initial_state)
    y_first, middle = run(first)
    y_second, end = run(replace(whole.steps(cut, 128), initial_state=middle))
    check(whole, torch.cat([y_first, y_second], dim=1), end)


@on_every_device
@pytest.mark.parametrize("log_gate", [False, True], ids=["linear", "log"])
@pytest.mark.parametrize("kept", ["BTH", "BT", "TH", "H", "T", "B", "BV", "HV", "TV", "V", "none"])
def test_broadcast_gate(device: str, kept: str, log_gate: bool) -> None:
    """A gate of size 1 in any dimension counts as repeated there; `kept` names the other ones."""
    sizes = (2, 33, 3, 12, 20)
    full = dict(zip("BTHV", (2, 33, 3, 20), strict=True))
    gate_shape = tuple(size if letter in kept else 1 for letter, size in full.items())
    run_and_check(make_problem(sizes, torch.float32, device, gate_shape=gate_shape, log_gate=log_gate, state=True))


@on_every_device
def test_one_tensor_for_all_arguments(device: str) -> None:
    """q, k, v and gate may be one tensor."""
    x = 0.5 * make_problem((2, 33, 3, 16, 16), device=device).q
    run_and_check(Problem(x, x, x, x, output_final_state=True))


# ---------------------------------------------------------------------------------------------------------------------
# Empty and many
# ---------------------------------------------------------------------------------------------------------------------


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("state", [False, True], ids=["from zero", "initial state"])
@pytest.mark.parametrize("empty", ["B", "T", "H", "K", "V", "TK", "BTHKV"])
def test_empty(device: str, dtype: torch.dtype, state: bool, empty: str) -> None:
    """Any size may be 0. K = 0 gives y = 0 (not what the memory held), T = 0 gives a copy of the initial state."""
    full = dict(zip("BTHKV", (2, 5, 3, 4, 6), strict=True))
    sizes = tuple(0 if letter in empty else size for letter, size in full.items())
    problem = make_problem(sizes, dtype, device, state=state)
    y, final_state = run_and_check(problem)
    assert not y.any()
    if empty == "T":
        start = problem.initial_state if state else torch.zeros_like(final_state)
        assert torch.equal(final_state, start)


@on_every_device
@pytest.mark.parametrize(
    "sizes", [(65540, 3, 1, 4, 4), (1, 3, 65540, 4, 4), (300, 2, 300, 3, 5), (66000, 1, 1, 8, 16)], ids=str
)
def test_more_than_65535_pairs(device: str, sizes: tuple[int, ...]) -> None:
    """More (b, h) pairs than a grid has blocks in y or z."""
    run_and_check(make_problem(sizes, torch.float32, device, state=True))


@on_every_device
@pytest.mark.parametrize("T", [8192, 70001])
def test_long(device: str, T: int) -> None:
    """Thousands of chunks. A gate of 0 shortly before the end makes the last steps a small problem of their own."""
    problem = make_problem((1, T, 2, 8, 8), torch.float32, device)
    problem.gate[:, T - 60] = 0
    y, state = run(problem)
    check(problem.steps(0, 60), y[:, :60], None)
    check(problem.steps(T - 60, T), y[:, T - 60 :], state)


def need_gpu_memory(gigabytes: float) -> None:
    """Skips where the GPU has less free memory than that."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes:.0f} GB of free GPU memory, there are {free:.0f}: offsets over 2^31 NOT tested")


@pytest.fixture
def free_afterwards() -> Iterator[None]:
    """Gives the memory of a large test back."""
    yield
    torch.cuda.empty_cache()


def large_cuda_problem(sizes: tuple[int, int, int, int, int]) -> Problem:
    """Like make_problem in bfloat16, but drawn on the GPU, because there are billions of numbers."""
    B, T, H, K, V = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    for tensor in (q, k, v):
        tensor.normal_(generator=generator)
    gate = torch.empty_like(v).uniform_(generator=generator)
    return Problem(q, k, v, gate, output_final_state=True)


@needs_cuda
def test_over_2_31_elements_many_pairs(free_afterwards: None) -> None:
    """Every tensor of time steps has more than 2^31 elements, spread over two million (b, h) pairs."""
    need_gpu_memory(28)
    sizes = (131080, 16, 16, 64, 64)
    problem = replace(large_cuda_problem(sizes), output_final_state=False)
    assert problem.v.numel() > 2**31
    poison("cuda", [problem.v.nbytes])
    y, _ = problem.call()
    for b in (0, 65535, 65536, 131071, 131072, 131079):
        check(problem.batch(b), y[b : b + 1], None)


@needs_cuda
def test_over_2_31_elements_long(free_afterwards: None) -> None:
    """More than 2^31 elements along time in a few heads; a gate of 0 makes the last 64 steps a problem of their own."""
    need_gpu_memory(28)
    T = 2**21 + 96
    problem = large_cuda_problem((1, T, 16, 64, 64))
    assert problem.v.numel() > 2**31
    problem.gate[:, T - 64] = 0
    poison("cuda", [problem.v.nbytes])
    y, state = problem.call()
    check(problem.steps(0, 64), y[:, :64], None)
    check(problem.steps(T - 64, T), y[:, T - 64 :], state)


@needs_cuda
def test_over_2_31_elements_of_state(free_afterwards: None) -> None:
    """The final state has more than 2^31 elements; the initial state is one, expanded over the batch."""
    need_gpu_memory(24)
    B = 32776
    problem = large_cuda_problem((B, 2, 16, 64, 64))
    problem = replace(problem, initial_state=torch.randn(1, 16, 64, 64, device="cuda").expand(B, 16, 64, 64))
    y, state = problem.call()
    assert state.numel() > 2**31
    for b in (0, B // 2, B - 1):
        check(problem.batch(b), y[b : b + 1], state[b : b + 1])


@on_every_device
@pytest.mark.parametrize("dim", range(4))
def test_strides_over_2_31(device: str, dim: int, free_afterwards: None) -> None:
    """Small tensors whose elements lie more than 2^31 elements apart along one dimension."""
    if device == "cuda":
        need_gpu_memory(12)
    problem = make_problem((2, 2, 2, 2, 2), torch.float32, device, state=True)
    try:
        # On the CPU this only reserves addresses: pages that nobody touches take no memory.
        buffer = torch.empty(2**31 + 4096, dtype=torch.float32, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for a buffer of 8.6 GB, offsets over 2^31 NOT tested: {error}")
    offsets = iter(range(0, 4096, 64))

    def spread(tensor: Tensor) -> Tensor:
        strides = [1, 2, 4]
        strides.insert(dim, 2**31 + 5)
        view = buffer.as_strided(tensor.shape, strides, next(offsets))
        return view.copy_(tensor)

    run_and_check(problem.map(spread))


# ---------------------------------------------------------------------------------------------------------------------
# Strides and memory
# ---------------------------------------------------------------------------------------------------------------------


def placed(tensor: Tensor, base_shape: list[int], view: Callable[[Tensor], Tensor]) -> Tensor:
    """The same values as a view of a larger tensor that is NaN everywhere else."""
    base = torch.full(base_shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
    return view(base).copy_(tensor)


def stored_as(order: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Values laid out in memory with the dimensions in this order."""
    back = [order.index(dim) for dim in range(len(order))]
    return lambda tensor: tensor.permute(order).contiguous().permute(back)


def every_other(dim: int) -> Callable[[Tensor], Tensor]:
    """Every other element along one dimension of a larger tensor."""

    def layout(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] *= 2
        index = [slice(None)] * tensor.dim()
        index[dim] = slice(1, None, 2)
        return placed(tensor, shape, lambda base: base[tuple(index)])

    return layout


def within_rows(before: int, after: int) -> Callable[[Tensor], Tensor]:
    """Rows inside wider rows, as in a packed projection of q, k and v."""

    def layout(tensor: Tensor) -> Tensor:
        width = tensor.shape[-1]
        shape = [*tensor.shape[:-1], before + width + after]
        return placed(tensor, shape, lambda base: base[..., before : before + width])

    return layout


def shifted(elements: int) -> Callable[[Tensor], Tensor]:
    """Contiguous, but off the alignment that the allocator gives."""
    return lambda tensor: placed(tensor, [tensor.numel() + elements], lambda base: base[elements:].view(tensor.shape))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "heads before time": stored_as((0, 2, 1, 3)),
    "time before batch": stored_as((1, 0, 2, 3)),
    "heads innermost": stored_as((0, 1, 3, 2)),
    "batch innermost": stored_as((1, 2, 3, 0)),
    "all reversed": stored_as((3, 2, 1, 0)),
    "every other batch": every_other(0),
    "every other step": every_other(1),
    "every other head": every_other(2),
    "every other column": every_other(3),
    "rows within rows": within_rows(20, 20),
    "odd pitch": within_rows(0, 1),
    "odd start and pitch": within_rows(3, 2),
    "one element off": shifted(1),
    "two elements off": shifted(2),
}


@on_every_device
@each_dtype([torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(2, 40, 3, 24, 24), (2, 19, 2, 20, 32), (1, 130, 2, 64, 64)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: str, dtype: torch.dtype, sizes: tuple[int, ...], layout: str) -> None:
    """Any strides and any alignment, for all arguments at once."""
    problem = make_problem(sizes, dtype, device, state=True)
    run_and_check(problem.map(LAYOUTS[layout]))


@on_every_device
@each_dtype([torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "initial_state"])
def test_one_odd_layout(device: str, dtype: torch.dtype, name: str) -> None:
    """One argument with odd strides among contiguous ones: catches one tensor's strides used for another."""
    problem = make_problem((2, 40, 3, 24, 24), dtype, device, state=True)
    for layout in ("all reversed", "odd start and pitch", "one element off"):
        run_and_check(replace(problem, **{name: LAYOUTS[layout](getattr(problem, name))}))


@on_every_device
@pytest.mark.parametrize("turn", range(5))
def test_a_layout_for_each(device: str, turn: int) -> None:
    """Every argument in another layout."""
    layouts = ["heads before time", "every other column", "odd start and pitch", "time before batch", "one element off"]
    problem = make_problem((2, 40, 3, 24, 24), torch.float32, device, state=True)
    mixed = {}
    for place, (name, tensor) in enumerate(problem.tensors().items()):
        mixed[name] = LAYOUTS[layouts[(turn + place) % 5]](tensor)
    run_and_check(replace(problem, **mixed))


@on_every_device
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "initial_state"])
def test_expanded(device: str, name: str, dim: int) -> None:
    """Stride 0 in any dimension of any argument."""
    problem = make_problem((2, 40, 3, 24, 24), torch.float32, device, state=True)
    tensor = getattr(problem, name)
    expanded = tensor.narrow(dim, 0, 1).expand(tensor.shape)
    assert expanded.stride(dim) == 0
    run_and_check(replace(problem, **{name: expanded}))


@on_every_device
def test_strides_of_size_one(device: str) -> None:
    """The stride of a dimension of size 1 means nothing and may be anything."""
    problem = make_problem((1, 20, 1, 24, 24), torch.float32, device, state=True)

    def odd(tensor: Tensor) -> Tensor:
        strides = [7919 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        return tensor.as_strided(tensor.shape, strides)

    run_and_check(problem.map(odd))


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE, (1, 17, 2, 7, 100), (1, 1, 1, 1, 1)], ids=str)
def test_poisoned_memory(device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """NaN left by an earlier call in shared memory, registers, scratch space and free blocks must not come through."""
    bad = make_problem((1, 64, 16, 128, 128), dtype, device).map(lambda tensor: torch.full_like(tensor, torch.nan))
    similar = make_problem(sizes, dtype, device, state=True).map(lambda tensor: torch.full_like(tensor, torch.nan))
    problem = make_problem(sizes, dtype, device)
    for _ in range(2):
        bad.call()
        similar.call()
        poison(device, [2**power for power in range(9, 25)])
        run_and_check(problem)


@on_every_device
def test_results_are_new(device: str) -> None:
    """No result is cached or handed out twice, and y, the final state and the initial state live apart."""
    problem = make_problem(SEED_SHAPE, torch.float32, device, state=True)
    start = problem.initial_state.clone()
    first_y, first_state = problem.call()
    kept_y, kept_state = first_y.clone(), first_state.clone()
    second_y, second_state = problem.call()
    assert not share_memory(first_y, second_y)
    assert not share_memory(first_state, second_state)
    second_y.fill_(1)
    assert torch.equal(second_state, kept_state)
    second_state.fill_(2)
    assert torch.equal(second_y, torch.ones_like(second_y))
    assert torch.equal(first_y, kept_y)
    assert torch.equal(first_state, kept_state)
    assert torch.equal(problem.initial_state, start)
    problem.q.mul_(2)
    third_y, _ = problem.call()
    assert torch.equal(third_y, 2 * kept_y)


@on_every_device
@each_dtype(DTYPES)
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE, (8, 300, 16, 64, 64)], ids=str)
def test_repeatable(device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """The same bits on every run: no atomics, no race."""
    problem = make_problem(sizes, dtype, device, state=True)
    first_y, first_state = problem.call()
    for _ in range(8):
        y, state = problem.call()
        assert torch.equal(y, first_y)
        assert torch.equal(state, first_state)


@on_every_device
def test_threads(device: str) -> None:
    """Calls from several threads at once do not share scratch space."""
    problems = [make_problem((2, 100 + seed, 3, 40, 30), torch.float32, device, seed=seed) for seed in range(4)]
    alone = [problem.call() for problem in problems]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(Problem.call, problems * 20))
    for index, (y, state) in enumerate(together):
        assert torch.equal(y, alone[index % 4][0])
        assert torch.equal(state, alone[index % 4][1])


# ---------------------------------------------------------------------------------------------------------------------
# The surface: signature, module, settings
# ---------------------------------------------------------------------------------------------------------------------


def test_signature() -> None:
    """Names, order, defaults and keyword-only options are as documented."""
    parameters = inspect.signature(gated_delta).parameters
    defaults = {"scale": 1.0, "initial_state": None, "output_final_state": False, "log_gate": False}
    assert list(parameters) == ["q", "k", "v", "gate", *defaults]
    for name, default in defaults.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == default
    for name in ("q", "k", "v", "gate"):
        assert parameters[name].default is inspect.Parameter.empty
    assert list(inspect.signature(gated_delta_reference).parameters) == list(parameters)


def test_public_names() -> None:
    """`__all__` names things that exist and hold what users are told to use; the public function is documented."""
    assert {"gated_delta", "ModelNew"} <= set(gated_delta_jit.__all__)
    for name in gated_delta_jit.__all__:
        assert hasattr(gated_delta_jit, name), name
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?\S*", gated_delta_jit.__version__)
    for name in ("scale", "initial_state", "output_final_state", "log_gate"):
        assert name in gated_delta.__doc__


def test_no_warning() -> None:
    """A plain call is silent."""
    problem = make_problem((1, 4, 1, 3, 3), state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem.call()


@on_every_device
@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_model_copies(device: str, copied: str) -> None:
    """ModelNew has no parameters and no state, and its copies work."""
    model = ModelNew().to(device)
    twin = copy.deepcopy(model) if copied == "deepcopy" else pickle.loads(pickle.dumps(model))
    problem = make_problem((2, 20, 3, 24, 24), device=device)
    y = twin(problem.q, problem.k, problem.v, problem.gate)
    assert isinstance(model, torch.nn.Module)
    assert len(model.state_dict()) == len(list(model.parameters())) == 0
    model.load_state_dict(twin.state_dict())
    assert torch.equal(y, problem.call()[0])


@contextlib.contextmanager
def _default_dtype_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _tf32_allowed() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "default dtype float64": _default_dtype_float64,
    "TF32 allowed": _tf32_allowed,
    "deterministic algorithms": _deterministic_algorithms,
    "one thread": one_thread,
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
}


@on_every_device
@pytest.mark.parametrize("setting", SETTINGS)
def test_global_settings(device: str, setting: str) -> None:
    """Settings of the process change no result: float32 stays float32, results keep their types."""
    problem = make_problem(RAGGED_SHAPE, torch.float32, device, state=True)
    with SETTINGS[setting]():
        y, state = problem.call()
    check_form(problem, y, state)
    check(problem, y, state)


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


INT64 = r"int64|[Ll]ong"
FLOAT16 = r"float16|[Hh]alf"
BFLOAT16 = r"[Bb][Ff]loat16"
FLOAT32 = r"float32|[Ff]loat\b"
FLOAT64 = r"float64|[Dd]ouble"


class Wrong(NamedTuple):
    """One wrong call: what to put in place of good arguments (B, T, H, K, V = 2, 5, 3, 4, 6) and what must come."""

    what: str
    error: type[Exception]
    named: str
    texts: list[str]
    change: Callable[[dict[str, Any]], dict[str, Any]]
    dtype: torch.dtype = torch.float32


Arguments = dict[str, Any]


def cast(name: str, dtype: torch.dtype) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: good[name].to(dtype)}


def sized(name: str, *sizes: int) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: good[name].new_ones(sizes)}


def given(name: str, value: Any) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: value}


def all_cast(dtype: torch.dtype) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: good[name].to(dtype) for name in ("q", "k", "v", "gate")}


def moved(name: str, device: str) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: good[name].to(device)}


F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
ERRORS = [
    # What came must be in the message, and what was expected.
    Wrong("q is a list", TypeError, "q", ["[Tt]ensor", "list"], lambda good: {"q": good["q"].tolist()}),
    Wrong("k is None", TypeError, "k", ["[Tt]ensor", "None"], given("k", None)),
    Wrong("v is a string", TypeError, "v", ["[Tt]ensor", "str"], given("v", "v")),
    Wrong("gate is a number", TypeError, "gate", ["[Tt]ensor", "float"], given("gate", 0.5)),
    Wrong("state is a tuple", TypeError, "initial_state", ["[Tt]ensor", "tuple"], given("initial_state", (0.0,))),
    Wrong("q has rank 3", ValueError, "q", ["4", "2, 5, 12"], sized("q", 2, 5, 12)),
    Wrong("k has rank 5", ValueError, "k", ["4", "2, 5, 3, 4, 1"], sized("k", 2, 5, 3, 4, 1)),
    Wrong("v has rank 2", ValueError, "v", ["4", "5, 6"], sized("v", 5, 6)),
    Wrong("gate has rank 3", ValueError, "gate", ["4", "2, 5, 3"], sized("gate", 2, 5, 3)),
    Wrong("gate has rank 0", ValueError, "gate", ["4"], sized("gate")),
    Wrong("state has rank 3", ValueError, "initial_state", ["4", "3, 4, 6"], sized("initial_state", 3, 4, 6)),
    Wrong("k has another B", ValueError, "k", ["2, 5, 3, 4", "1, 5, 3, 4"], sized("k", 1, 5, 3, 4)),
    Wrong("k has another T", ValueError, "k", ["2, 5, 3, 4", "2, 9, 3, 4"], sized("k", 2, 9, 3, 4)),
    Wrong("k has another H", ValueError, "k", ["2, 5, 3, 4", "2, 5, 1, 4"], sized("k", 2, 5, 1, 4)),
    Wrong("k has another K", ValueError, "k", ["2, 5, 3, 4", "2, 5, 3, 6"], sized("k", 2, 5, 3, 6)),
    Wrong("k has no steps", ValueError, "k", ["2, 5, 3, 4", "2, 0, 3, 4"], sized("k", 2, 0, 3, 4)),
    Wrong("v has another B", ValueError, "v", ["2, 5, 3", "4, 5, 3, 6"], sized("v", 4, 5, 3, 6)),
    Wrong("v has another T", ValueError, "v", ["2, 5, 3", "2, 1, 3, 6"], sized("v", 2, 1, 3, 6)),
    Wrong("v has another H", ValueError, "v", ["2, 5, 3", "2, 5, 6, 6"], sized("v", 2, 5, 6, 6)),
    Wrong("gate has K", ValueError, "gate", ["2, 5, 3, 6", "2, 5, 3, 4"], sized("gate", 2, 5, 3, 4)),
    Wrong("gate has no T", ValueError, "gate", ["2, 5, 3, 6", "2, 0, 3, 6"], sized("gate", 2, 0, 3, 6)),
    Wrong("gate has another B", ValueError, "gate", ["4, 5, 3, 6"], sized("gate", 4, 5, 3, 6)),
    Wrong("gate has another H", ValueError, "gate", ["2, 5, 2, 6"], sized("gate", 2, 5, 2, 6)),
    Wrong(
        "state has V, K exchanged",
        ValueError,
        "initial_state",
        ["2, 3, 4, 6", "2, 3, 6, 4"],
        sized("initial_state", 2, 3, 6, 4),
    ),
    Wrong(
        "state is to be broadcast",
        ValueError,
        "initial_state",
        ["2, 3, 4, 6", "1, 3, 4, 6"],
        sized("initial_state", 1, 3, 4, 6),
    ),
    Wrong("q is int64", TypeError, "q", [INT64, FLOAT32], cast("q", torch.int64)),
    Wrong("all are int64", TypeError, "q", [INT64, FLOAT32], all_cast(torch.int64)),
    Wrong("all are complex", TypeError, "q", ["[Cc]omplex", FLOAT32], all_cast(torch.complex64)),
    Wrong("all are bool", TypeError, "q", ["[Bb]ool", FLOAT32], all_cast(torch.bool)),
    Wrong("all are float8", TypeError, "q", ["[Ff]loat8", FLOAT32], all_cast(torch.float8_e4m3fn)),
    Wrong("k is int32", TypeError, "k", ["[Ii]nt", FLOAT32], cast("k", torch.int32)),
    Wrong("k is float64 beside float32", TypeError, "k", [FLOAT64, FLOAT32], cast("k", F64)),
    Wrong("v is float16 beside float32", TypeError, "v", [FLOAT16, FLOAT32], cast("v", F16)),
    Wrong("v is bfloat16 beside float16", TypeError, "v", [BFLOAT16, FLOAT16], cast("v", BF16), F16),
    Wrong("k is float32 beside bfloat16", TypeError, "k", [FLOAT32, BFLOAT16], cast("k", F32), BF16),
    Wrong("gate is int64", TypeError, "gate", [INT64, FLOAT32], cast("gate", torch.int64)),
    Wrong("gate is bool", TypeError, "gate", ["[Bb]ool", FLOAT32], cast("gate", torch.bool)),
    Wrong("gate is float64 beside float32", TypeError, "gate", [FLOAT64, FLOAT32], cast("gate", F64)),
    Wrong("gate is float16 beside float32", TypeError, "gate", [FLOAT16, FLOAT32], cast("gate", F16)),
    Wrong("gate is bfloat16 beside float16", TypeError, "gate", [BFLOAT16, FLOAT16], cast("gate", BF16), F16),
    Wrong("gate is float32 beside float64", TypeError, "gate", [FLOAT32, FLOAT64], cast("gate", F32), F64),
    Wrong("gate is float64 beside bfloat16", TypeError, "gate", [FLOAT64, BFLOAT16], cast("gate", F64), BF16),
    Wrong("state is float16", TypeError, "initial_state", [FLOAT16, FLOAT32], cast("initial_state", F16), F16),
    Wrong("state is float64", TypeError, "initial_state", [FLOAT64, FLOAT32], cast("initial_state", F64)),
    Wrong("float64, state float32", TypeError, "initial_state", [FLOAT32, FLOAT64], cast("initial_state", F32), F64),
    Wrong("state is int64", TypeError, "initial_state", [INT64, FLOAT32], cast("initial_state", torch.int64)),
    Wrong("q is on meta", ValueError, "(q|k)", ["meta"], moved("q", "meta")),
    Wrong("k is on meta", ValueError, "k", ["meta"], moved("k", "meta")),
    Wrong("v is on meta", ValueError, "v", ["meta"], moved("v", "meta")),
    Wrong("gate is on meta", ValueError, "gate", ["meta"], moved("gate", "meta")),
    Wrong("state is on meta", ValueError, "initial_state", ["meta"], moved("initial_state", "meta")),
]


def check_error(wrong: Wrong, device: str) -> None:
    """The call raises exactly this class, names argument, expectation and what came, and leaves the others alone."""
    problem = make_problem((2, 5, 3, 4, 6), wrong.dtype, device, state=True, output_final_state=True)
    arguments = {**problem.tensors(), "output_final_state": True}
    arguments.update(wrong.change(arguments))
    tensors = [value for value in arguments.values() if isinstance(value, Tensor) and value.device.type != "meta"]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(wrong.error) as caught:
        gated_delta(**arguments)
    message = str(caught.value)
    assert type(caught.value) is wrong.error
    assert message.startswith("gated_delta:"), message
    assert re.search(f"`{wrong.named}`", message), message
    for text in wrong.texts:
        assert re.search(text, message), f"{text} is not in: {message}"
    assert len(message) < 400, "no C++ stack trace belongs in the message"
    for tensor, values in zip(tensors, before, strict=True):
        # complex128 holds every dtype of the table; torch.equal does not know all of them.
        assert torch.equal(tensor.to(torch.complex128), values.to(torch.complex128))
    check_form(problem, *problem.call())


@on_every_device
@pytest.mark.parametrize("wrong", ERRORS, ids=lambda wrong: wrong.what)
def test_errors(device: str, wrong: Wrong) -> None:
    """Every way of calling wrongly gets one exception that says what is wrong; a good call works afterwards."""
    check_error(wrong, device)


@needs_cuda
@pytest.mark.parametrize("name", ["k", "v", "gate", "initial_state"])
def test_mixed_devices(name: str) -> None:
    """One argument on the CPU among CUDA tensors, and the other way round."""
    check_error(Wrong("mixed", ValueError, name, ["cpu", "cuda"], moved(name, "cpu")), "cuda")
    check_error(Wrong("mixed", ValueError, name, ["cpu", "cuda"], moved(name, "cuda")), "cpu")


@on_every_device
def test_errors_come_before_empty(device: str) -> None:
    """Wrong shapes are errors even where there is nothing to compute."""
    empty = make_problem((2, 0, 3, 4, 6), device=device)
    with pytest.raises(ValueError, match="^gated_delta:.*`k`"):
        gated_delta(empty.q, empty.k.new_ones(2, 0, 3, 5), empty.v, empty.gate)


def test_errors_on_meta() -> None:
    """The fake kernel, which torch.compile asks, refuses what the real one refuses."""
    meta = make_problem((2, 5, 3, 4, 6), device="meta")
    with pytest.raises((ValueError, TypeError, RuntimeError), match="`v`"):
        gated_delta(meta.q, meta.k, meta.v[:, :3], meta.gate)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="`gate`"):
        gated_delta(meta.q, meta.k, meta.v, meta.gate[..., :3])


def test_model_errors() -> None:
    """ModelNew refuses in the same words."""
    problem = make_problem((2, 5, 3, 4, 6))
    with pytest.raises(ValueError, match="^gated_delta:.*`k`"):
        ModelNew()(problem.q, problem.k[:, 1:], problem.v, problem.gate)


ODD_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "sparse rows": lambda tensor: tensor.to_sparse_csr(dense_dim=tensor.dim() - 2),
    "mkldnn": lambda tensor: tensor.to_mkldnn(),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor.unbind())),
    "nested, jagged": lambda tensor: torch.nested.nested_tensor(list(tensor.unbind()), layout=torch.jagged),
}


@pytest.mark.parametrize("kind", ODD_KINDS)
@pytest.mark.parametrize("name", ["q", "gate", "all"])
@pytest.mark.filterwarnings("ignore")
def test_odd_kinds_of_tensors(kind: str, name: str) -> None:
    """Tensors that are no plain memory get an exception with a text: no crash, no numbers out of thin air."""
    problem = make_problem((2, 5, 3, 4, 4))
    try:
        odd = {argument: ODD_KINDS[kind](tensor) for argument, tensor in problem.tensors().items()}
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch makes no such tensor: {error}")
    chosen = odd if name == "all" else {name: odd[name]}
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)) as caught:
        replace(problem, **chosen).call()
    assert len(str(caught.value)) > 10


# ---------------------------------------------------------------------------------------------------------------------
# Gradients: refused for now, never silently missing
# ---------------------------------------------------------------------------------------------------------------------


def with_grad(problem: Problem, name: str) -> Problem:
    """The problem with one argument that requires grad."""
    return replace(problem, **{name: getattr(problem, name).clone().requires_grad_()})


@on_every_device
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "initial_state"])
def test_requires_grad_is_refused(device: str, name: str) -> None:
    """Until gradients exist a call that would lose one raises; so does the operator behind the function."""
    problem = with_grad(make_problem((2, 5, 3, 4, 6), device=device, state=True), name)
    with pytest.raises(RuntimeError, match="^gated_delta:.*grad"):
        problem.call()
    with pytest.raises(RuntimeError, match="grad"):
        OPERATOR(*problem.operator_arguments())
    if name != "initial_state":
        with pytest.raises(RuntimeError, match="^gated_delta:.*grad"):
            ModelNew()(problem.q, problem.k, problem.v, problem.gate)


@on_every_device
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", ["q", "initial_state"])
def test_requires_grad_without_grad_mode(device: str, mode: Callable[[], Any], name: str) -> None:
    """With grad mode off such inputs are fine, and the results require nothing."""
    problem = with_grad(make_problem((2, 5, 3, 4, 6), device=device, state=True), name)
    with mode():
        y, state = problem.call()
        check_form(problem, y, state)
    check(problem.map(Tensor.detach), y, state)


def test_requires_grad_of_inference_tensors() -> None:
    """Tensors made in inference mode can be used outside it."""
    with torch.inference_mode():
        problem = make_problem((2, 5, 3, 4, 6), state=True)
    y, state = problem.call()
    check(problem, y, state)


@pytest.mark.filterwarnings("ignore")
def test_functional_grad_is_refused() -> None:
    """torch.func.grad raises instead of answering with zeros."""
    problem = make_problem((2, 5, 3, 4, 6))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.grad(lambda q: gated_delta(q, problem.k, problem.v, problem.gate)[0].sum())(problem.q)


@pytest.mark.filterwarnings("ignore")
def test_forward_mode_is_refused() -> None:
    """Forward-mode AD raises instead of dropping the tangent."""
    problem = make_problem((2, 5, 3, 4, 6))
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        replace(problem, q=forward_ad.make_dual(problem.q, torch.ones_like(problem.q))).call()


# ---------------------------------------------------------------------------------------------------------------------
# A real operator: dispatcher, fake tensors, transforms, torch.compile
# ---------------------------------------------------------------------------------------------------------------------

OPERATOR_CASES = {
    "plain": {"output_final_state": False},
    "final state": {"output_final_state": True},
    "both states": {"output_final_state": True, "state": True, "scale": 0.5},
    "initial state, log gate": {"output_final_state": False, "state": True, "log_gate": True},
    "broadcast gate": {"gate_shape": (1, 1, 3, 1)},
    "bfloat16, float32 gate": {"dtype": torch.bfloat16, "gate_dtype": torch.float32, "state": True},
    "float64": {"dtype": torch.float64, "state": True},
}
on_operator_cases = pytest.mark.parametrize("case", OPERATOR_CASES)


@on_every_device
@on_operator_cases
def test_operator(device: str, case: str) -> None:
    """The operator itself gives what the function gives; its final state has shape (0,) when not asked for."""
    problem = make_problem((2, 20, 3, 12, 16), device=device, **OPERATOR_CASES[case])
    y, state = OPERATOR(*problem.operator_arguments())
    if not problem.output_final_state:
        assert state.shape == (0,)
        state = None
    check_form(problem, y, state)
    check(problem, y, state)
    assert torch.equal(y, problem.call()[0])


@on_every_device
@on_operator_cases
def test_opcheck(device: str, case: str) -> None:
    """Schema, fake kernel and AOT dispatch agree with the operator, by torch's own checks."""
    problem = make_problem((2, 20, 3, 12, 16), device=device, **OPERATOR_CASES[case])
    torch.library.opcheck(OPERATOR, problem.operator_arguments())
    torch.library.opcheck(OPERATOR, problem.map(LAYOUTS["heads before time"]).operator_arguments())


def test_operator_namespace() -> None:
    """The namespace holds the hash of the library: registering one name twice would kill the process."""
    digest = re.search(r"[0-9a-f]{8,}", Path(gated_delta_jit.LIBRARY).name).group()
    assert digest in OPERATOR.namespace


@on_operator_cases
def test_meta(case: str) -> None:
    """Meta tensors go through and come out with the right form."""
    problem = make_problem((2, 20, 3, 12, 16), device="meta", **OPERATOR_CASES[case])
    check_form(problem, *problem.call())


@on_every_device
@on_operator_cases
@pytest.mark.parametrize("layout", ["contiguous", "heads before time", "every other column"])
def test_fake_tensors(device: str, case: str, layout: str) -> None:
    """Fake tensors come out with the form of real results, whatever the strides of the inputs."""
    problem = make_problem((2, 20, 3, 12, 16), device=device, **OPERATOR_CASES[case]).map(LAYOUTS[layout])
    with torch._subclasses.FakeTensorMode() as mode:
        fake = problem.map(mode.from_tensor)
        y, state = fake.call()
        assert isinstance(y, torch._subclasses.FakeTensor)
        check_form(fake, y, state)


def compiled(device: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A small function around gated_delta, compiled into one graph."""
    torch.compiler.reset()

    def around(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, initial_state: Tensor | None, **flags: Any) -> Any:
        y, state = gated_delta(2 * q, k, v, gate, initial_state=initial_state, **flags)
        return y + 0, state

    backend = "inductor" if device == "cuda" else "aot_eager"
    return torch.compile(around, fullgraph=True, backend=backend, **options)


@on_every_device
@on_operator_cases
def test_compile(device: str, case: str) -> None:
    """torch.compile(fullgraph=True): no graph break, right numbers, also for permuted inputs."""
    problem = make_problem((2, 20, 3, 12, 16), device=device, **OPERATOR_CASES[case]).map(LAYOUTS["heads before time"])
    y, state = compiled(device)(problem.q, problem.k, problem.v, problem.gate, **problem.options())
    doubled = replace(problem, q=2 * problem.q)
    check_form(doubled, y, state)
    check(doubled, y, state)


@on_every_device
def test_compile_dynamic(device: str) -> None:
    """B and T marked dynamic: no specialisation (that is an error), no second compilation, right numbers."""
    function = compiled(device)
    first = make_problem((2, 17, 3, 12, 16), device=device, state=True)
    for name in ("q", "k", "v", "gate"):
        torch._dynamo.mark_dynamic(getattr(first, name), [0, 1])
    torch._dynamo.mark_dynamic(first.initial_state, 0)
    function(first.q, first.k, first.v, first.gate, **first.options())
    second = make_problem((5, 64, 3, 12, 16), device=device, state=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        y, state = function(second.q, second.k, second.v, second.gate, **second.options())
    check(replace(second, q=2 * second.q), y, state)


@on_every_device
def test_compile_refuses_grad(device: str) -> None:
    """A compiled call does not lose a gradient silently either."""
    problem = with_grad(make_problem((2, 20, 3, 12, 16), device=device), "v")
    with pytest.raises(RuntimeError, match="grad"):
        compiled(device)(problem.q, problem.k, problem.v, problem.gate, **problem.options())


@on_every_device
@each_dtype([torch.float32, *HALVES])
def test_autocast(device: str, dtype: torch.dtype) -> None:
    """Autocast changes neither types nor numbers of a call whose types go together."""
    problem = make_problem((2, 20, 3, 12, 16), dtype, device, state=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, state = run(problem)
    check(problem, y, state)


@on_every_device
@pytest.mark.parametrize("half", ["q", "k", "v", "gate"])
def test_autocast_mixed(device: str, half: str) -> None:
    """Types that autocast has mixed are refused or handled rightly, never misread."""
    problem = make_problem((2, 20, 3, 12, 16), torch.float32, device)
    mixed = replace(problem, **{half: getattr(problem, half).bfloat16()})
    with torch.autocast(device, dtype=torch.bfloat16):
        try:
            y, _ = mixed.call()
        except TypeError as error:
            assert str(error).startswith("gated_delta:")
            return
    error = (y.double() - oracle(mixed)[0]).norm() / oracle(mixed)[0].norm()
    assert error < 4 * TOLERANCE[torch.bfloat16].norm


@on_every_device
@pytest.mark.filterwarnings("ignore")
def test_vmap(device: str) -> None:
    """torch.func.vmap gives the right numbers or says that it cannot."""
    sizes = (2, 20, 3, 12, 16)
    problems = [make_problem(sizes, device=device, seed=seed, output_final_state=False) for seed in range(3)]
    stacked = [torch.stack([getattr(problem, name) for problem in problems]) for name in ("q", "k", "v", "gate")]
    try:
        y = torch.func.vmap(lambda q, k, v, gate: gated_delta(q, k, v, gate)[0])(*stacked)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        assert len(str(error)) > 10
        return
    for index, problem in enumerate(problems):
        check(problem, y[index], None)


class Named(torch.Tensor):
    """A subclass with nothing of its own."""


class Wrapper(torch.Tensor):
    """A subclass that has no memory and unwraps itself in `__torch_dispatch__`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        form = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **form)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda value: value.inner if isinstance(value, cls) else value, (args, kwargs or {}))
        return function(*args, **kwargs)


SUBCLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": lambda tensor: tensor.as_subclass(Named),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "buffer": torch.nn.Buffer,
    "wrapper": Wrapper,
    "negative view": lambda tensor: torch._neg_view(-tensor),
}


@on_every_device
@pytest.mark.parametrize("kind", SUBCLASSES)
@pytest.mark.parametrize("name", ["q", "gate", "all"])
def test_subclasses(device: str, kind: str, name: str) -> None:
    """Subclasses and lazy views go through the dispatcher: right numbers, never the bytes behind a wrapper."""
    problem = make_problem((2, 20, 3, 12, 16), device=device, state=True)
    chosen = problem.tensors() if name == "all" else {name: getattr(problem, name)}
    odd = replace(problem, **{argument: SUBCLASSES[kind](tensor) for argument, tensor in chosen.items()})
    y, state = odd.call()
    check(problem, y.as_subclass(Tensor), state.as_subclass(Tensor))


# ---------------------------------------------------------------------------------------------------------------------
# CUDA: streams, graphs, devices
# ---------------------------------------------------------------------------------------------------------------------

SLEEP_CYCLES = 100_000_000  # about 50 ms: far longer than any launch


@needs_cuda
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE, (1, 300, 2, 128, 128)], ids=str)
def test_side_stream(sizes: tuple[int, ...]) -> None:
    """The kernels run on the current stream: there the inputs are NaN until a long wait is over."""
    problem = make_problem(sizes, torch.float32, "cuda", state=True)
    late = problem.map(lambda tensor: torch.full_like(tensor, torch.nan))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The first launch of a kernel loads it, which may wait for the GPU.
        late.call()
        stream.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        for name, tensor in late.tensors().items():
            tensor.copy_(getattr(problem, name))
        y, state = late.call()
        assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    check(problem, y, state)


@needs_cuda
def test_two_streams() -> None:
    """Calls on two streams at once do not share scratch space."""
    problems = [make_problem((4, 700 + seed, 8, 64, 64), torch.float32, "cuda", seed=seed) for seed in range(2)]
    alone = [problem.call() for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    together: list[list[tuple[Tensor, Tensor | None]]] = [[], []]
    for _ in range(10):
        for index in range(2):
            with torch.cuda.stream(streams[index]):
                together[index].append(problems[index].call())
    torch.cuda.synchronize()
    for index, results in enumerate(together):
        for y, state in results:
            assert torch.equal(y, alone[index][0])
            assert torch.equal(state, alone[index][1])


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE, (2, 300, 3, 130, 40)], ids=str)
def test_graph_replay(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Captured once without a warm-up, replayed with changed inputs; replays leave nothing behind in scratch space."""
    static = make_problem(sizes, dtype, "cuda", state=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, state = static.call()
    for seed in (1, 2, 3):
        fresh = make_problem(sizes, dtype, "cuda", state=True, seed=seed)
        for name, tensor in static.tensors().items():
            tensor.copy_(getattr(fresh, name))
        y.fill_(torch.nan)
        state.fill_(torch.nan)
        graph.replay()
        check(fresh, y, state)
        first = y.clone()
        graph.replay()
        assert torch.equal(y, first)


@needs_cuda
def test_several_calls_in_one_graph() -> None:
    """Two calls in one graph, the second fed by the first."""
    whole = make_problem((2, 128, 4, 24, 24), torch.float32, "cuda", state=True)
    first = replace(whole.steps(0, 70), initial_state=whole.initial_state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_first, middle = first.call()
        y_second, end = replace(whole.steps(70, 128), initial_state=middle).call()
    graph.replay()
    check(whole, torch.cat([y_first, y_second], dim=1), end)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs: the other-device test did NOT run")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("sizes", [SEED_SHAPE, RAGGED_SHAPE, (1, 130, 2, 130, 257)], ids=str)
def test_other_device(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Tensors on a device that is not current, in turns, so that attributes set for one device only show."""
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        with torch.cuda.device(0):
            run_and_check(make_problem(sizes, dtype, device, state=True))
            assert torch.cuda.current_device() == 0
        with torch.cuda.device(1):
            run_and_check(make_problem(sizes, dtype, device, state=True))
            assert torch.cuda.current_device() == 1


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs: the mixed-device test did NOT run")
@pytest.mark.parametrize("name", ["k", "v", "gate", "initial_state"])
def test_mixed_cuda_devices(name: str) -> None:
    """One argument on another GPU is an error, not a read through the peer link."""
    check_error(Wrong("mixed", ValueError, name, ["cuda:0", "cuda:1"], moved(name, "cuda:1")), "cuda:0")


# ---------------------------------------------------------------------------------------------------------------------
# The file: what KernelBench accepts, what stands in the sources
# ---------------------------------------------------------------------------------------------------------------------

# Outside of comments; KernelBench's static checker reads the file line by line and cuts each at its first # and //.
BANNED = {
    "the word that does nothing": r"\bpass\b",
    "fallback": r"\btry\s*:",
    "handler": r"\bexcept\b",
    "threads": r"\bimport\s+threading\b|\bfrom\s+threading\b|threading\.Thread|\b(Thread|Process)PoolExecutor\b",
    "processes": r"\bimport\s+multiprocessing\b|\bfrom\s+multiprocessing\b|multiprocessing\.\w",
    "futures": r"concurrent\.futures",
    "own streams": r"cuda\.Stream\s*\(|\.wait_stream\s*\(|\.record_stream\s*\(",
    "tensor subclasses": r"_make_subclass|_make_wrapper_subclass|class\s+\w+\s*\(\s*(torch\.)?Tensor\s*\)",
    "ready-made layers": r"torch\.nn\.functional|\bnn\.functional\b|torch\.nn\.(?!(Module|Parameter|parameter|init)\b)",
    "ready-made products": r"torch\.(mm|bmm|matmul|einsum|clamp)\b",
    "future imports": r"\bfrom\s+__future__\b",
    "numpy": r"\bimport\s+numpy\b|\bfrom\s+numpy\b|\.numpy\(",
    "flags that change arithmetic": r"use_fast_math|-ffast-math|-Ofast",
}


def without_comments(text: str) -> str:
    return "\n".join(line.split("#")[0].split("//")[0] for line in text.split("\n"))


@pytest.mark.parametrize("what", BANNED)
def test_banned_words(what: str) -> None:
    """KernelBench's checker and our own rules find nothing in gated_delta_jit.py, docstrings and messages included."""
    found = [line for line in without_comments(SOURCE).split("\n") if re.search(BANNED[what], line)]
    assert not found, found


def test_banned_words_are_found() -> None:
    """The patterns above match what they are for."""
    bad = {
        "the word that does nothing": "one pass over the data",
        "fallback": "try :",
        "handler": "    except ValueError",
        "threads": "import threading",
        "processes": "from multiprocessing import Pool",
        "futures": "import concurrent.futures",
        "own streams": "torch.cuda.Stream()",
        "tensor subclasses": "class Lazy(torch.Tensor):",
        "ready-made layers": "torch.nn.Linear",
        "ready-made products": "torch.einsum(",
        "future imports": "from __future__ import annotations",
        "numpy": "import numpy as np",
        "flags that change arithmetic": "'--use_fast_math'",
    }
    assert list(bad) == list(BANNED)
    for what, text in bad.items():
        assert re.search(BANNED[what], text), what
    assert not re.search(BANNED["the word that does nothing"], "bypass, passed, passes")


def test_is_a_cuda_extension_for_the_checker() -> None:
    """KernelBench wants to see a kernel and torch's own way of building it, outside of comments."""
    text = without_comments(SOURCE)
    assert "__global__" in text
    assert re.search(r"load_inline|cpp_extension", text)


def test_licence_travels_with_the_file() -> None:
    """The file is copied alone, so it says whose it is and under which licence."""
    head = "\n".join(SOURCE.split("\n")[:10])
    assert "SPDX-License-Identifier: MIT" in head
    assert "Copyright" in head


def test_sources_are_complete() -> None:
    """The CUDA text needs no torch header, the torch text not the slow one that drags everything in."""
    includes = re.findall(r"#\s*include\s*[<\"]([^>\"]+)", gated_delta_jit.CUDA_SOURCE)
    assert not [name for name in includes if name.startswith(("torch/", "ATen/", "c10/"))]
    assert "__global__" in gated_delta_jit.CUDA_SOURCE
    assert "torch/extension.h" not in gated_delta_jit.CPP_SOURCE
    assert "TORCH_LIBRARY" in gated_delta_jit.CPP_SOURCE


# ---------------------------------------------------------------------------------------------------------------------
# Build and import, each in a process of its own
# ---------------------------------------------------------------------------------------------------------------------

TIME_LIMIT = 300

# Prints one line of JSON: what the import did and whether the operator works.
IMPORT = """
import json, sys, time
import torch
assert "torch.utils.cpp_extension" not in sys.modules
start = time.perf_counter()
import gated_delta_jit
seconds = time.perf_counter() - start
two = torch.full((1, 1, 1, 2), 2.0)
y, state = gated_delta_jit.gated_delta(two, two, two, two)
print(json.dumps({
    "y": y.flatten().tolist(),
    "seconds": seconds,
    "library": str(gated_delta_jit.LIBRARY),
    "file": gated_delta_jit.__file__,
    "has_cuda": gated_delta_jit.HAS_CUDA,
    "cpp_extension": "torch.utils.cpp_extension" in sys.modules,
    "cuda_initialized": torch.cuda.is_initialized(),
}))
"""


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with changes (None removes); the module under test is found by PYTHONPATH."""
    defaults = {
        "PYTHONPATH": str(SOURCE_PATH.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        # torch itself says this on stderr; anything else there is ours.
        "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
    }
    variables = {**os.environ, **defaults, **changes}
    return {name: value for name, value in variables.items() if value is not None}


def cpu_variant(root: Path, **changes: str | None) -> dict[str, str]:
    """An environment that builds the CPU part alone, in a cache of its own."""
    settings = {"TORCH_EXTENSIONS_DIR": str(root), "CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": None}
    return environment(**{**settings, **changes})


def python(code: str, folder: Path, variables: dict[str, str], *, fails: bool = False) -> subprocess.CompletedProcess:
    """Runs code in a new interpreter that starts in `folder`."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == (1 if fails else 0), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def check_import(stdout: str) -> dict[str, Any]:
    """What IMPORT printed; the operator must have worked."""
    lines = stdout.splitlines()
    assert len(lines) == 1, stdout
    report = json.loads(lines[0])
    assert report["y"] == [16.0, 16.0]
    return report


def path_without(program: str) -> str:
    """PATH less the folders that hold the program, unless a C++ compiler lives there too."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep) if folder]
    kept = [folder for folder in folders if not (folder / program).exists() or (folder / "c++").exists()]
    return os.pathsep.join(map(str, kept))


@dataclass
class ColdBuild:
    """A build in an empty cache: where, with which environment, what came out."""

    folder: Path
    root: Path
    variables: dict[str, str]
    stderr: str
    report: dict[str, Any]


def cold_build(folder: Path, variables: dict[str, str]) -> ColdBuild:
    done = python(IMPORT, folder, variables)
    return ColdBuild(folder, Path(variables["TORCH_EXTENSIONS_DIR"]), variables, done.stderr, check_import(done.stdout))


@pytest.fixture(scope="module")
def cpu_build(tmp_path_factory: pytest.TempPathFactory) -> ColdBuild:
    """The CPU part, built once for all tests below, in a cache whose path has a space, without ninja on PATH."""
    folder = tmp_path_factory.mktemp("cold build")
    return cold_build(folder, cpu_variant(folder / "torch extensions", PATH=path_without("ninja")))


def check_cold_build(build: ColdBuild) -> None:
    lines = build.stderr.splitlines()
    assert len(lines) == 2, build.stderr
    assert all(line.startswith("gated_delta_jit: ") for line in lines), build.stderr
    assert "compil" in lines[0]
    assert str(build.root) in lines[0]
    assert re.search(r"\d\s*s", lines[0]), "how long it will take"
    assert re.search(r"\d\s*s", lines[1]), "how long it took"
    library = Path(build.report["library"])
    assert re.fullmatch(r"gated_delta_jit_[0-9a-f]+_(cpu|sm\w+)\.so", library.name)
    assert library == build.root / library.stem / library.name
    assert library.is_file()
    assert not build.report["cuda_initialized"]


def check_warm_import(build: ColdBuild) -> None:
    """Silent, the same library untouched, without torch.utils.cpp_extension, and quick in the best of three."""
    library = Path(build.report["library"])
    built = library.stat().st_mtime_ns
    seconds = []
    for _ in range(3):
        done = python(IMPORT, build.folder, build.variables)
        report = check_import(done.stdout)
        assert done.stderr == ""
        assert report["library"] == str(library)
        assert library.stat().st_mtime_ns == built
        assert not report["cpp_extension"]
        assert not report["cuda_initialized"]
        seconds.append(report["seconds"])
        if report["seconds"] < 0.3:
            break
    assert min(seconds) < 0.3, seconds


def test_cold_build(cpu_build: ColdBuild) -> None:
    """Two lines on stderr, the library where it belongs, right numbers; a space in the path, ninja not on PATH."""
    check_cold_build(cpu_build)
    assert not cpu_build.report["has_cuda"]
    assert Path(cpu_build.report["library"]).stem.endswith("_cpu")


def test_warm_import(cpu_build: ColdBuild) -> None:
    """A second process loads the library in silence."""
    check_warm_import(cpu_build)


@needs_cuda
def test_cold_build_with_cuda(tmp_path: Path) -> None:
    """The same with the CUDA part: cold, then warm."""
    build = cold_build(tmp_path, environment(TORCH_EXTENSIONS_DIR=str(tmp_path / "torch extensions")))
    check_cold_build(build)
    assert build.report["has_cuda"]
    assert "_sm" in Path(build.report["library"]).stem
    check_warm_import(build)


def test_killed_build_and_four_at_once(cpu_build: ColdBuild, tmp_path: Path) -> None:
    """A build is killed half-way and old lock files lie about; then four processes start at once and all succeed."""
    root = tmp_path / "cache"
    variables = cpu_variant(root)
    name = Path(cpu_build.report["library"]).stem
    command = [sys.executable, "-c", IMPORT]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    victim = subprocess.Popen(command, cwd=tmp_path, env=variables, start_new_session=True, **streams)
    assert victim.stderr.readline().startswith("gated_delta_jit: ")
    time.sleep(2)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    (root / name).mkdir(parents=True, exist_ok=True)
    for folder in root.glob("gated_delta_jit_*/"):
        (folder / "lock").touch()
    (root / f"{name}.lock").touch()
    four = [subprocess.Popen(command, cwd=tmp_path, env=variables, **streams) for _ in range(4)]
    try:
        results = [process.communicate(timeout=TIME_LIMIT) for process in four]
    finally:
        for process in four:
            process.kill()
    for process, (stdout, stderr) in zip(four, results, strict=True):
        assert process.returncode == 0, stderr
        assert check_import(stdout)["library"] == str(root / name / f"{name}.so")
    assert len(list(root.rglob("*.so"))) == 1
    assert python(IMPORT, tmp_path, variables).stderr == ""


def failing_import(folder: Path, variables: dict[str, str]) -> str:
    """The last exception of an import that must fail, from its name on."""
    done = python("import gated_delta_jit", folder, variables, fails=True)
    start = done.stderr.rfind("\nRuntimeError: ")
    assert start >= 0, done.stderr
    return done.stderr[start + 1 :]


def test_broken_compiler(tmp_path: Path) -> None:
    """A compiler that fails gives a message that says what to look at, and nothing that a later import would trust."""
    variables = cpu_variant(tmp_path / "cache", CXX="/bin/false")
    message = failing_import(tmp_path, variables)
    assert message.startswith("RuntimeError: gated_delta_jit:"), message
    assert re.search(r"CXX|compiler", message), message
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_no_compiler(tmp_path: Path) -> None:
    """No compiler on PATH: the message says that one is needed."""
    (tmp_path / "bin").mkdir()
    ninja = shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if ninja:
        (tmp_path / "bin" / "ninja").symlink_to(ninja)
    variables = cpu_variant(tmp_path / "cache", PATH=str(tmp_path / "bin"), CXX=None, CC=None)
    message = failing_import(tmp_path, variables)
    assert message.startswith("RuntimeError: gated_delta_jit:"), message
    assert "compiler" in message, message
    assert re.search(r"g\+\+|CXX", message), message


def test_unwritable_cache(tmp_path: Path) -> None:
    """A cache that cannot be written (here below a file, because permissions do not stop root) is named."""
    (tmp_path / "file").write_text("no folder")
    root = tmp_path / "file" / "cache"
    message = failing_import(tmp_path, cpu_variant(root))
    assert message.startswith("RuntimeError: gated_delta_jit:"), message
    assert str(root) in message, message
    assert "TORCH_EXTENSIONS_DIR" in message, message


def test_copied_alone(cpu_build: ColdBuild, tmp_path: Path) -> None:
    """The file works when it is the only one copied, from any folder, and finds the library that is there."""
    shutil.copy(SOURCE_PATH, tmp_path / "gated_delta_jit.py")
    done = python(IMPORT, tmp_path, {**cpu_build.variables, "PYTHONPATH": ""})
    report = check_import(done.stdout)
    assert Path(report["file"]).parent == tmp_path
    assert report["library"] == cpu_build.report["library"]
    assert done.stderr == ""


def test_without_numpy(cpu_build: ColdBuild) -> None:
    """numpy is no requirement."""
    code = f"import sys, warnings\nwarnings.simplefilter('ignore')\nsys.modules['numpy'] = None\n{IMPORT}"
    check_import(python(code, cpu_build.folder, cpu_build.variables).stdout)


KERNELBENCH = """
import torch
source = open(PATH).read()
q, k, v, gate = (torch.rand(2, 20, 3, 12) for _ in range(4))
results = []

def execute():
    context = {}
    exec(compile(source, "<string>", "exec"), context)
    assert "__file__" not in context and "__name__" not in context
    results.append(context["ModelNew"]()(q, k, v, gate))

def imported():
    import gated_delta_jit
    results.append(gated_delta_jit.ModelNew()(q, k, v, gate))

for step in ORDER:
    step()
assert all(torch.equal(result, results[0]) for result in results)
assert torch.allclose(results[0][:, 0], (q * k)[:, 0].sum(-1, keepdim=True) * v[:, 0])
print(len(results))
"""


@pytest.mark.parametrize("order", ["execute, execute, imported", "imported, execute, imported"])
def test_exec_as_kernelbench(cpu_build: ColdBuild, order: str) -> None:
    """exec of the source with `__name__ == "builtins"` and no `__file__`, twice, before and after an import."""
    code = KERNELBENCH.replace("PATH", repr(str(SOURCE_PATH))).replace("ORDER", f"({order})")
    done = python(code, cpu_build.folder, cpu_build.variables)
    assert done.stdout == "3\n"
    assert done.stderr == ""


def test_exec_with_a_line_in_front(cpu_build: ColdBuild) -> None:
    """KernelBench puts a line in front that sets the cache folder: the library must still be found."""
    first = f"import os\nos.environ['TORCH_EXTENSIONS_DIR'] = {str(cpu_build.root)!r}\n"
    code = f"""
context = {{}}
exec(compile({first!r} + open({str(SOURCE_PATH)!r}).read(), "<string>", "exec"), context)
print(context["LIBRARY"])
"""
    done = python(code, cpu_build.folder, {**cpu_build.variables, "TORCH_EXTENSIONS_DIR": "/nowhere"})
    assert done.stdout.strip() == cpu_build.report["library"]
    assert done.stderr == ""


def test_dump(tmp_path: Path) -> None:
    """`--dump` writes both sources and compiles nothing: here it could not."""
    variables = cpu_variant(tmp_path / "cache", CXX="/bin/false")
    command = [sys.executable, str(SOURCE_PATH), "--dump", str(tmp_path / "sources")]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "sources").iterdir()} == {"gated_delta.cu", "gated_delta.cpp"}
    assert (tmp_path / "sources" / "gated_delta.cu").read_text().strip() == gated_delta_jit.CUDA_SOURCE.strip()
    assert (tmp_path / "sources" / "gated_delta.cpp").read_text().strip() == gated_delta_jit.CPP_SOURCE.strip()
    assert not list(tmp_path.rglob("*.so"))


@needs_cuda
def test_import_leaves_cuda_alone(tmp_path: Path) -> None:
    """Import creates no CUDA context and does not even initialise the driver: a fork may follow."""
    code = """
import ctypes
import torch
import gated_delta_jit
assert gated_delta_jit.HAS_CUDA
assert not torch.cuda.is_initialized()
count = ctypes.c_int()
not_initialized = 3
assert ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) == not_initialized
"""
    assert python(code, tmp_path, environment()).stderr == ""


@needs_cuda
def test_library_serves_where_nvcc_is_missing(tmp_path: Path) -> None:
    """A cached library that covers the GPU is used as it is where there is no nvcc (a container after its build)."""
    path = path_without("nvcc")
    if shutil.which("nvcc", path=path):
        pytest.skip("nvcc lies in the C++ compiler's own folder: use without nvcc NOT tested")
    done = python(IMPORT, tmp_path, environment(PATH=path, CUDA_HOME="/nowhere", CUDA_PATH=None))
    report = check_import(done.stdout)
    assert report["library"] == str(gated_delta_jit.LIBRARY)
    assert report["has_cuda"]
    assert done.stderr == ""


@needs_cuda
def test_first_call_of_a_process_is_captured(tmp_path: Path) -> None:
    """Nothing is built or set up at the first call: it may happen under capture."""
    code = """
import torch
import gated_delta_jit
q, k, v, gate = (torch.rand(2, 128, 4, 24, device="cuda") for _ in range(4))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y, state = gated_delta_jit.gated_delta(q, k, v, gate)
graph.replay()
captured = y.clone()
eager, state = gated_delta_jit.gated_delta(q, k, v, gate)
assert torch.equal(captured, eager)
assert torch.allclose(eager[:, 0], (q * k)[:, 0].sum(-1, keepdim=True) * v[:, 0])
"""
    python(code, tmp_path, environment())


@needs_cuda
def test_cuda_tensors_without_the_cuda_part(cpu_build: ColdBuild) -> None:
    """A library that holds the CPU part alone says what is missing when it gets CUDA tensors."""
    code = """
import os
import gated_delta_jit
import torch
assert not gated_delta_jit.HAS_CUDA
del os.environ["CUDA_VISIBLE_DEVICES"]
x = torch.rand(1, 2, 1, 3, device="cuda")
gated_delta_jit.gated_delta(x, x, x, x)
"""
    done = python(code, cpu_build.folder, cpu_build.variables, fails=True)
    assert re.search(r"\nRuntimeError: gated_delta:.*(CUDA|nvcc)", done.stderr), done.stderr
