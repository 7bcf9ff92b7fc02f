"""Is gated_delta_jit right on this machine, how fast is it, against what, and how far from the limit?

    python bench.py                   the whole run: 30 s on a CPU, minutes on a GPU (most of them tune FLA)
    python bench.py --quick           fewer shapes and repeats
    python bench.py --no-fla          without flash-linear-attention
    python bench.py --torch-compile   adds the reference loop under torch.compile, which compiles for minutes
    python bench.py --json FILE       writes everything that was measured to FILE

Method: the result is compared with a float64 oracle before anything is timed; the exit status is 1 when it is wrong.
"graph" is the time per call inside a replayed CUDA graph (GPU time, no launch cost from Python), "eager" the wall time
per call as a program sees it. All figures are medians, +- is half the distance between the quartiles. Inputs that fit
well into L2 stay there; larger ones rotate through enough buffer sets to exceed it. The floor is a kernel that touches
every input and output byte once or, for rotated buffers, the bytes over the copy rate; both are measured in the same
run. Tables go to stdout, progress to stderr. Ctrl-C keeps what was measured.
"""

import argparse
import datetime
import gc
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from reference import Model, gated_delta_reference

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Norm of the error over norm of the float64 result, on the same rounded inputs.
TOLERANCE = {torch.float32: 3e-7, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 2.5e-3}
# A peer further off than this is shown as wrong and not timed. TF32 and bf16 states stay well below.
PEER_LIMIT = 3e-2

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[], object]


# ----------------------------------------------------------------------------------------------------------------------
# Problems and inputs
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One size: q, k, v, gate and y all have shape (B, T, H, D)."""

    B: int
    T: int
    H: int
    D: int
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """Every input byte once and every output byte once."""
        return 5 * self.B * self.T * self.H * self.D * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"({self.B}, {self.T}, {self.H}, {self.D}) {self.dtype_name}"


SEED = Problem(B=2, T=128, H=4, D=24)
CPU_PROBLEMS = [SEED, Problem(B=1, T=1024, H=8, D=64), Problem(B=4, T=256, H=8, D=64)]


def short_problems(quick: bool) -> list[Problem]:
    """K = V from 16 to 64, T from 64 to 512, 8 and 64 pairs (b, h): where launch and latency count as much as bytes."""
    sizes = [16, 64] if quick else [16, 32, 64]
    lengths = [128] if quick else [64, 128, 256, 512]
    dtypes = [torch.float32, torch.bfloat16]
    return [Problem(B, T, 8, D, dtype) for dtype in dtypes for D in sizes for T in lengths for B in (1, 8)]


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "10 % zeros": lambda x: torch.where(x > 1.2816, 0.0, torch.sigmoid(x)),
    "negative": torch.tanh,
    "around 1": lambda x: 1 + 0.05 * torch.tanh(x),
    "around 1e-20": lambda x: 1e-20 * torch.exp(0.5 * x),
}


def make_inputs(problem: Problem, device: str, seed: int = 0, gates: str = "sigmoid") -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.B, problem.T, problem.H, problem.D)
    q, k, v, x = (torch.randn(shape, generator=generator, device=device) for _ in range(4))
    return (
        q.to(problem.dtype),
        k.to(problem.dtype),
        v.to(problem.dtype),
        GATES[gates](x).to(problem.dtype),
    )


def oracle_of(inputs: Inputs) -> torch.Tensor:
    q, k, v, gate = (x.double() for x in inputs)
    return gated_delta_reference(q, k, v, gate)[0]


def relative_error(y: torch.Tensor, oracle: torch.Tensor) -> float:
    """Norm of the error over norm of the oracle; infinite for a wrong shape, NaN when y holds a NaN."""
    if y.shape != oracle.shape:
        return math.inf
    return ((y.double() - oracle).norm() / oracle.norm()).item()


# ----------------------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Timing:
    """Seconds per call, one sample for each repeat."""

    samples: list[float]

    @property
    def us(self) -> float:
        return 1e6 * statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.samples) < 4:
            return (max(self.samples) - min(self.samples)) / 2 / statistics.median(self.samples)
        low, middle, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / middle


@dataclass
class Row:
    """One measurement: what ran, on which problem, how it was timed, and what came out."""

    section: str
    name: str
    method: str  # "graph" or "eager"
    problem: str
    us: float | None = None
    spread: float | None = None
    error: float | None = None
    speed_up: float | None = None  # against the reference loop timed the same way
    floor_us: float | None = None
    buffer_sets: int = 1
    note: str = ""

    @property
    def floor_share(self) -> float | None:
        if self.us is None or self.floor_us is None:
            return None
        return self.floor_us / self.us


@dataclass
class Report:
    """Everything measured so far. Rows are printed as they come, so that an interrupted run has shown them already."""

    environment: dict[str, str]
    checks: list[dict[str, object]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    wrong: bool = False

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def summarise(self, text: str) -> None:
        self.summary.append(text)
        self.say(text)

    def check(self, problem: Problem, gates: str, error: float) -> bool:
        """Record ours against the oracle; False when it is out of tolerance (NaN is)."""
        tolerance = TOLERANCE[problem.dtype]
        right = error <= tolerance
        self.wrong = self.wrong or not right
        self.checks.append(
            {"problem": str(problem), "gates": gates, "error": error, "tolerance": tolerance, "right": right}
        )
        return right

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def find(self, section: str, name: str, method: str) -> Row | None:
        for row in self.rows:
            if (row.section, row.name, row.method) == (section, name, method):
                return row
        return None

    def write_json(self, path: str) -> None:
        rows = [{**asdict(row), "floor_share": row.floor_share} for row in self.rows]
        document = {
            "environment": self.environment,
            "right": not self.wrong,
            "checks": self.checks,
            "rows": rows,
            "summary": self.summary,
        }
        # JSON has no NaN and no infinity: an error that is one of them becomes null.
        text = json.dumps(json_safe(document), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n")


def json_safe(value: object) -> object:
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def progress(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def brief(error: BaseException) -> str:
    """Type and first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:140]


def number(value: float | None, form: str = ".2f", suffix: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{suffix}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


ROW_HEADER = f"{'':34}{'timing':>7}{'us/call':>11}{'+-':>7}{'x loop':>9}{'of floor':>10}{'error':>10}"


def format_row(row: Row) -> str:
    spread = "-" if row.spread is None else f"{100 * row.spread:.1f}%"
    line = (
        f"{row.name:34}{row.method:>7}{number(row.us):>11}{spread:>7}{number(row.speed_up, '.1f'):>9}"
        f"{percent(row.floor_share):>10}{number(row.error, '.1e'):>10}"
    )
    return f"{line}  {row.note}".rstrip()


# ----------------------------------------------------------------------------------------------------------------------
# Clocks
# ----------------------------------------------------------------------------------------------------------------------


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_eager(
    calls: dict[str, Call], rounds: int, round_seconds: float = 0.02, limit_seconds: float = 6.0
) -> dict[str, Timing]:
    """Wall time per call of each of `calls`, taken in turn within every round so that drift of the host hits all alike.

    A sample is a loop of up to 1000 calls that ends with a synchronize. On a machine so slow or busy that the rounds
    take longer than `limit_seconds`, fewer are run.
    """
    counts: dict[str, int] = {}
    for name, call in calls.items():
        # The first call warms up, the second is an estimate.
        for _ in range(2):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            per_call = time.perf_counter() - start
        counts[name] = max(1, min(1000, round(round_seconds / per_call)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    deadline = time.perf_counter() + limit_seconds
    try:
        for round_index in range(rounds + 1):
            if round_index > 1 and time.perf_counter() > deadline:
                break
            for name, call in calls.items():
                count = counts[name]
                synchronize()
                start = time.perf_counter()
                for _ in itertools.repeat(None, count):
                    call()
                synchronize()
                seconds = time.perf_counter() - start
                # The first round warms up.
                if round_index > 0:
                    samples[name].append(seconds / count)
    finally:
        gc.enable()
    return {name: Timing(values) for name, values in samples.items()}


class CallGraph:
    """`count` calls, taken from `calls` in rotation, captured in one CUDA graph.

    The latest result of every buffer set stays alive, so that rotated calls write to different memory.
    """

    def __init__(self, calls: Sequence[Call], count: int) -> None:
        self.count = count
        self.results: list[object] = [None] * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(count):
                self.results[i % len(calls)] = calls[i % len(calls)]()

    def replay(self, times: int) -> list[float]:
        """Seconds per call of each of `times` replays.

        All replays are enqueued before the first result is read: the host runs ahead and its launch cost stays hidden.
        """
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        milliseconds = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        return [1e-3 * x / self.count for x in milliseconds]


def time_graph(calls: Sequence[Call], quick: bool = False) -> Timing:
    """GPU time per call in a replayed CUDA graph; `calls` holds the same call on one or more sets of buffers.

    A graph holds enough calls (at most about 100) for 0.4 ms, so that the gap between replays does not count.
    """
    for call in calls:
        # Twice: the first call may compile or tune, which a capture does not allow.
        call()
        call()
    sets = len(calls)
    count = sets
    while True:
        graph = CallGraph(calls, count)
        graph.replay(3)
        per_call = max(1e-7, statistics.median(graph.replay(5)))
        wanted = sets * max(1, round(min(400e-6 / per_call, 100) / sets))
        # A short graph shows mostly the gap between replays, so the estimate is taken again on a longer one.
        if wanted <= 1.5 * count:
            break
        del graph
        count = wanted
    per_replay = count * per_call
    # The clock of an idle GPU needs some 30 ms of work to rise.
    graph.replay(max(3, min(300, math.ceil(0.03 / per_replay))))
    repeats = max(12, min(200, math.ceil((0.02 if quick else 0.06) / per_replay)))
    # The first replays run while the host has no lead yet.
    return Timing(graph.replay(repeats + 2)[2:])


def buffer_sets(problem: Problem) -> int:
    """One set while inputs and output fit well into L2, else enough to exceed twice its size."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    cache = getattr(properties, "L2_cache_size", 0) or 64 << 20
    if problem.bytes < cache / 8:
        return 1
    return max(2, math.ceil(2 * cache / problem.bytes))


# ----------------------------------------------------------------------------------------------------------------------
# The limits of the machine: empty launch, touch, copy
# ----------------------------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def empty_kernel():
        pass

    @triton.jit
    def touch_kernel(q, k, v, gate, y, size, BLOCK: tl.constexpr):
        """Read every element of the four inputs once, write every element of the output once."""
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        q_block = tl.load(q + offsets, mask=mask)
        k_block = tl.load(k + offsets, mask=mask)
        v_block = tl.load(v + offsets, mask=mask)
        gate_block = tl.load(gate + offsets, mask=mask)
        tl.store(y + offsets, q_block * k_block + v_block * gate_block, mask=mask)


def launch_empty() -> None:
    empty_kernel[(1,)]()


def touch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The least that any implementation must do: read q, k, v, gate and write something of y's size that needs them."""
    y = torch.empty_like(v)
    size = y.numel()
    # 128 threads of 16 bytes each per array; twice that for large problems.
    block = 2048 // y.element_size()
    if size > 1 << 20:
        block *= 2
    touch_kernel[(triton.cdiv(size, block),)](q, k, v, gate, y, size, BLOCK=block, num_warps=4)
    return y


def check_touch(inputs: Inputs) -> None:
    """The floor must be honest: a touch kernel that skipped bytes would make every share too low."""
    q, k, v, gate = (x.float() for x in inputs)
    expected = q * k + v * gate
    if not torch.allclose(touch(*inputs).float(), expected, rtol=2e-2, atol=2e-2):
        raise RuntimeError("the touch kernel is wrong")


def copy_rate() -> float:
    """Bytes read plus bytes written per second by a large device-to-device copy, outside a graph."""
    free, _ = torch.cuda.mem_get_info()
    source = torch.rand(min(1 << 29, free // 32), device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end))
    return 2 * source.numel() * source.element_size() / statistics.median(times[2:])


# ----------------------------------------------------------------------------------------------------------------------
# Peers: flash-linear-attention
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """Another implementation. `prepare` does what a caller does once, untimed, and returns the timed call."""

    name: str
    prepare: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]


FLA_RECURRENT = "FLA fused_recurrent (exact)"
FLA_CHUNK = "FLA chunk_gsa_fwd_k (TF32, bf16)"


def load_fla() -> tuple[list[Peer], str]:
    """Both implementations of this operator in flash-linear-attention, and its version or why there is none.

    It wants the natural log of the gate in float32, which is prepared outside the timing.
    """
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return [], "not installed (pip install fla-core)"
    progress(f"importing fla-core {version}")
    warnings.filterwarnings("ignore", module=r"fla\b")
    try:
        from fla.ops.common.fused_recurrent import fused_recurrent
        from fla.ops.gsa.chunk_fwd import chunk_gsa_fwd_k
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2
    except Exception as error:  # a peer that does not import is a result, whatever it raises
        return [], f"{version}, import fails: {brief(error)}"

    def prepare_recurrent(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        log_gate = gate.float().log()

        def call() -> torch.Tensor:
            return fused_recurrent(q, k, v, gv=log_gate, scale=1.0)[0]

        return call

    def prepare_chunk(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        log_gate = gate.float().log()

        def call() -> torch.Tensor:
            summed = chunk_local_cumsum(log_gate, chunk_size=64, scale=RCP_LN2)
            return chunk_gsa_fwd_k(q, k, v, summed, scale=1.0, chunk_size=64)[2]

        return call

    return [Peer(FLA_RECURRENT, prepare_recurrent), Peer(FLA_CHUNK, prepare_chunk)], version


def precompile_fla(problems: Sequence[Problem]) -> None:
    """Fill Triton's cache with FLA's kernels, one process for each head size and dtype.

    FLA's autotuner compiles some 90 variants of each, one after another: about a minute for every head size. This only
    compiles them side by side; the choice among them is still FLA's own, made in this process on a quiet GPU.
    """
    workers = (os.cpu_count() or 1) // 2
    cases = list({(p.H, p.D, p.dtype_name): p for p in problems}.values())
    if workers < 2 or len(cases) < 2:
        progress(f"FLA tunes itself for {len(cases)} head sizes and dtypes: allow a minute each")
        return
    progress(f"compiling FLA's kernels for {len(cases)} head sizes and dtypes, {workers} at a time: a minute or two")
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}
    start = time.perf_counter()
    waiting = list(cases)
    running: list[subprocess.Popen[bytes]] = []
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                p = waiting.pop()
                case = f"{p.B},{p.T},{p.H},{p.D},{p.dtype_name}"
                command = [sys.executable, str(Path(__file__).resolve()), "--fla-precompile", case]
                silence = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                running.append(subprocess.Popen(command, env=environment, **silence))
            time.sleep(0.2)
            still_running = [process for process in running if process.poll() is None]
            if len(still_running) < len(running):
                done += len(running) - len(still_running)
                progress(f"  {done} of {len(cases)} compiled after {time.perf_counter() - start:.0f} s")
            running = still_running
    finally:
        for process in running:
            process.kill()


def precompile_fla_here(case: str) -> int:
    """The child process of precompile_fla: run each of FLA's implementations once."""
    B, T, H, D, dtype_name = case.split(",")
    problem = Problem(int(B), int(T), int(H), int(D), getattr(torch, dtype_name))
    inputs = make_inputs(problem, "cuda")
    for peer in load_fla()[0]:
        try:
            peer.prepare(*inputs)()
        except Exception as error:  # the parent meets the same error and shows it
            progress(brief(error))
    synchronize()
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# Sections
# ----------------------------------------------------------------------------------------------------------------------


def check_results(report: Report, model: torch.nn.Module, device: str) -> None:
    """Ours against the float64 oracle at the seed's shape: four dtypes, five kinds of gate, poisoned memory."""
    report.say("Correctness at (B, T, H, D) = (2, 128, 4, 24): norm of the error / norm of the float64 result")
    report.say(f"{'gates':14}" + "".join(f"{str(dtype).removeprefix('torch.'):>12}" for dtype in TOLERANCE))
    for gates in GATES:
        cells = []
        for dtype in TOLERANCE:
            problem = Problem(SEED.B, SEED.T, SEED.H, SEED.D, dtype)
            inputs = make_inputs(problem, device, seed=1, gates=gates)
            oracle = oracle_of(inputs)
            # The allocator hands this block out again: an element that is not written stays NaN.
            poison = torch.full_like(inputs[2], math.nan)
            del poison
            error = relative_error(model(*inputs), oracle)
            right = report.check(problem, gates, error)
            cells.append(f"{error:.1e}" if right else f"{error:.1e} !")
        report.say(f"{gates:14}" + "".join(f"{cell:>12}" for cell in cells))
    report.say(f"{'allowed':14}" + "".join(f"{tolerance:>12.1e}" for tolerance in TOLERANCE.values()))
    if report.wrong:
        report.say("WRONG: the figures marked ! are out of tolerance. Nothing is timed.")
    report.say()


@dataclass
class Bench:
    """What the GPU sections share."""

    report: Report
    model: torch.nn.Module
    peers: list[Peer]
    quick: bool
    bytes_per_second: float = math.nan

    @property
    def rounds(self) -> int:
        return 7 if self.quick else 25

    def floor_from_copy(self, problem: Problem) -> float:
        """Microseconds that the problem's bytes take at the copy rate."""
        return 1e6 * problem.bytes / self.bytes_per_second

    def graph_row(self, section: str, name: str, problem: Problem, calls: Sequence[Call], **more: object) -> Row:
        """Time `calls` in a graph; a failure becomes the row's note."""
        row = Row(section, name, "graph", str(problem), buffer_sets=len(calls), **more)
        try:
            timing = time_graph(calls, self.quick)
        except Exception as error:  # one row that fails must not end the run
            if isinstance(error.__context__, KeyboardInterrupt):
                # Ctrl-C during a capture surfaces as the capture's own failure.
                raise KeyboardInterrupt from error
            row.note = brief(error)
        else:
            row.us = timing.us
            row.spread = timing.spread
        return self.report.add(row)

    def eager_row(self, section: str, name: str, problem: Problem, timing: Timing, **more: object) -> Row:
        row = Row(section, name, "eager", str(problem), us=timing.us, spread=timing.spread, **more)
        return self.report.add(row)


def set_speed_up(row: Row, loop: Row | None) -> None:
    if row.us is not None and loop is not None and loop.us is not None:
        row.speed_up = loop.us / row.us


def measure_limits(bench: Bench) -> None:
    progress("copy rate")
    bench.bytes_per_second = copy_rate()
    bench.report.environment["copy rate"] = f"{bench.bytes_per_second / 1e12:.2f} TB/s (read + written)"
    bench.report.say(f"copy rate {bench.bytes_per_second / 1e12:.2f} TB/s, bytes read plus bytes written")
    bench.report.say()


def measure_seed(bench: Bench) -> None:
    """The seed's shape: machine limits, loop, ours and FLA, in a graph and eager."""
    section = "seed"
    report = bench.report
    inputs = make_inputs(SEED, "cuda")
    q, k = inputs[:2]
    oracle = oracle_of(inputs)
    loop = Model()
    report.say(f"Seed shape (B, T, H, D) = (2, 128, 4, 24), float32, {SEED.bytes / 1e6:.2f} MB in and out")
    report.say(ROW_HEADER)

    floor_us = bench.floor_from_copy(SEED)
    if triton is None:
        for name in ("an empty launch", "every byte touched once"):
            row = Row(section, name, "graph", str(SEED), note="needs triton, which is not installed")
            report.say(format_row(report.add(row)))
    else:
        row = bench.graph_row(section, "an empty launch", SEED, [launch_empty])
        report.say(format_row(row))
        try:
            check_touch(inputs)
        except Exception as error:  # without the floor the rest is still worth having
            row = report.add(Row(section, "every byte touched once", "graph", str(SEED), note=brief(error)))
        else:
            row = bench.graph_row(section, "every byte touched once", SEED, [partial(touch, *inputs)])
        if row.us is not None:
            floor_us = row.us
            row.note = "the floor"
        report.say(format_row(row))

    report.say(format_row(bench.graph_row(section, "torch.add(q, k)", SEED, [partial(torch.add, q, k)])))

    progress("reference loop, eager and in a graph")
    error = relative_error(loop(*inputs), oracle)
    more = {"floor_us": floor_us, "error": error}
    loop_graph = bench.graph_row(section, "reference loop", SEED, [partial(loop, *inputs)], **more)
    set_speed_up(loop_graph, loop_graph)
    report.say(format_row(loop_graph))
    timing = time_eager({"loop": partial(loop, *inputs)}, rounds=5, round_seconds=0.1)["loop"]
    loop_eager = bench.eager_row(section, "reference loop", SEED, timing, **more)
    set_speed_up(loop_eager, loop_eager)
    report.say(format_row(loop_eager))

    error = relative_error(bench.model(*inputs), oracle)
    note = "" if report.check(SEED, "sigmoid", error) else f"WRONG, {TOLERANCE[SEED.dtype]:.1e} is allowed"
    more = {"floor_us": floor_us, "error": error, "note": note}
    ours_graph = bench.graph_row(section, "gated_delta_jit", SEED, [partial(bench.model, *inputs)], **more)
    set_speed_up(ours_graph, loop_graph)
    report.say(format_row(ours_graph))
    calls = {"ours": partial(bench.model, *inputs), "add": partial(torch.add, q, k)}
    timings = time_eager(calls, rounds=bench.rounds)
    ours_eager = bench.eager_row(section, "gated_delta_jit", SEED, timings["ours"], **more)
    set_speed_up(ours_eager, loop_eager)
    report.say(format_row(ours_eager))
    report.say(format_row(bench.eager_row(section, "torch.add(q, k)", SEED, timings["add"])))
    report.say()
    if ours_graph.us is not None:
        times_loop = number(ours_graph.speed_up, ".0f")
        report.summarise(
            f"In a graph: {ours_graph.us:.2f} us, {percent(ours_graph.floor_share)} of the floor "
            f"({floor_us:.2f} us), {times_loop} times faster than the loop in a graph."
        )
    # Ratios within one round, so that a host that slows down between rounds does not count.
    pairs = zip(timings["ours"].samples, timings["add"].samples, strict=True)
    ratio = statistics.median(ours / add for ours, add in pairs)
    report.summarise(
        f"Eager: {timings['ours'].us:.2f} us a call, {ratio:.2f} times torch.add, "
        f"{number(ours_eager.speed_up, '.0f')} times faster than the loop."
    )
    report.say()


def measure_seed_peers(bench: Bench) -> None:
    """Two rows for each peer at the seed's shape: checked first, and a failure or a wrong result shown as such."""
    section = "seed"
    report = bench.report
    inputs = make_inputs(SEED, "cuda")
    oracle = oracle_of(inputs)
    loop_graph = report.find(section, "reference loop", "graph")
    loop_eager = report.find(section, "reference loop", "eager")
    ours = report.find(section, "gated_delta_jit", "graph")
    floor_us = ours.floor_us if ours else None
    report.say("flash-linear-attention at the seed's shape, log gate prepared outside the timing")
    report.say(ROW_HEADER)
    for peer in bench.peers:
        progress(f"{peer.name}: the first call at a head size tunes itself, for up to a minute")
        call, row = try_peer(section, peer, SEED, [inputs], oracle)
        if not call:
            report.say(format_row(report.add(row)))
            continue
        more = {"floor_us": floor_us, "error": row.error}
        row = bench.graph_row(section, peer.name, SEED, call, **more)
        set_speed_up(row, loop_graph)
        report.say(format_row(row))
        timing = time_eager({"peer": call[0]}, rounds=bench.rounds)["peer"]
        row = bench.eager_row(section, peer.name, SEED, timing, **more)
        set_speed_up(row, loop_eager)
        report.say(format_row(row))
    report.say()


def try_peer(
    section: str, peer: Peer, problem: Problem, buffers: Sequence[Inputs], oracle: torch.Tensor
) -> tuple[list[Call], Row]:
    """The peer's timed calls, one for each buffer set; none, and a note in the row, if it fails or is wrong.

    `oracle` belongs to the first buffer set.
    """
    row = Row(section, peer.name, "graph", str(problem), buffer_sets=len(buffers))
    calls: list[Call] = []
    try:
        timed = [peer.prepare(*inputs) for inputs in buffers]
        row.error = relative_error(timed[0](), oracle)
    except Exception as failure:  # a peer that fails is a result
        row.note = brief(failure)
        return calls, row
    if row.error <= PEER_LIMIT:
        calls.extend(timed)
    else:
        row.note = "wrong result, not timed"
    return calls, row


def measure_short(bench: Bench, problems: Sequence[Problem]) -> None:
    """Ours against both FLA paths over short sequences, in graphs, one line for each problem."""
    section = "short"
    report = bench.report
    report.say("Short shapes, us per call in a CUDA graph; speed-up against the faster of FLA's two implementations")
    report.say(
        f"{'dtype':9}{'B':>3}{'H':>4}{'T':>5}{'K=V':>5}{'sets':>5}{'floor':>8}{'ours':>8}{'of floor':>9}{'error':>9}"
        f"{'FLA rec.':>10}{'error':>9}{'FLA chunk':>10}{'error':>9}{'speed-up':>9}"
    )
    notes: dict[str, None] = {}
    slower = 0
    compared = 0
    for problem in problems:
        ours, peers, floor_us = measure_short_problem(bench, section, problem)
        cells = ""
        for name in (FLA_RECURRENT, FLA_CHUNK):
            row = peers.get(name)
            cells += f"{number(row.us if row else None):>10}{number(row.error if row else None, '.1e'):>9}"
            if row is not None and row.note:
                notes[f"{name} at {problem}: {row.note}"] = None
        if ours.note:
            notes[f"ours at {problem}: {ours.note}"] = None
        peer_times = [row.us for row in peers.values() if row.us is not None]
        speed_up = None
        if peer_times and ours.us is not None:
            speed_up = min(peer_times) / ours.us
            compared += 1
            slower += speed_up <= 1
        report.say(
            f"{problem.dtype_name:9}{problem.B:>3}{problem.H:>4}{problem.T:>5}{problem.D:>5}{ours.buffer_sets:>5}"
            f"{floor_us:>8.2f}{number(ours.us):>8}{percent(ours.floor_share):>9}{number(ours.error, '.1e'):>9}"
            f"{cells}{number(speed_up, '.1f', 'x'):>9}"
        )
    for note in notes:
        report.say(f"  {note}")
    report.say()
    if compared:
        report.summarise(f"Faster than both FLA implementations at {compared - slower} of {compared} short shapes.")
        report.say()


def measure_short_problem(bench: Bench, section: str, problem: Problem) -> tuple[Row, dict[str, Row], float]:
    """Rows of ours and of each peer at one problem, and the floor in microseconds."""
    sets = buffer_sets(problem)
    buffers = [make_inputs(problem, "cuda", seed) for seed in range(sets)]
    oracle = oracle_of(buffers[0])
    floor_us = bench.floor_from_copy(problem)
    if triton is not None and sets == 1:
        row = bench.graph_row(section, "every byte touched once", problem, [partial(touch, *buffers[0])])
        if row.us is not None:
            floor_us = row.us

    error = relative_error(bench.model(*buffers[0]), oracle)
    if bench.report.check(problem, "sigmoid", error):
        calls = [partial(bench.model, *inputs) for inputs in buffers]
        ours = bench.graph_row(section, "gated_delta_jit", problem, calls, error=error, floor_us=floor_us)
    else:
        ours = Row(section, "gated_delta_jit", "graph", str(problem), error=error, buffer_sets=sets)
        ours.note = f"WRONG, {TOLERANCE[problem.dtype]:.1e} is allowed; not timed"
        bench.report.add(ours)

    peers: dict[str, Row] = {}
    for peer in bench.peers:
        timed, row = try_peer(section, peer, problem, buffers, oracle)
        if timed:
            row = bench.graph_row(section, peer.name, problem, timed, error=row.error, floor_us=floor_us)
        else:
            bench.report.add(row)
        peers[peer.name] = row
    return ours, peers, floor_us


def measure_compiled_loop(bench: Bench) -> None:
    """The reference loop under torch.compile at the seed's shape. Last, because it compiles for minutes."""
    section = "torch.compile"
    report = bench.report
    inputs = make_inputs(SEED, "cuda")
    oracle = oracle_of(inputs)
    loop_graph = report.find("seed", "reference loop", "graph")
    loop_eager = report.find("seed", "reference loop", "eager")
    ours = report.find("seed", "gated_delta_jit", "graph")
    floor_us = ours.floor_us if ours else None
    progress("torch.compile of the loop: 128 unrolled steps take about six minutes; Ctrl-C keeps everything above")
    report.say("The reference loop under torch.compile, seed shape")
    report.say(ROW_HEADER)
    compiled = torch.compile(Model(), dynamic=False)
    start = time.perf_counter()
    try:
        error = relative_error(compiled(*inputs), oracle)
    except Exception as failure:  # a peer that fails is a result
        row = Row(section, "compiled loop", "graph", str(SEED), note=brief(failure))
        report.say(format_row(report.add(row)))
        return
    synchronize()
    note = f"compiled in {time.perf_counter() - start:.0f} s"
    more = {"floor_us": floor_us, "error": error}
    row = bench.graph_row(section, "compiled loop", SEED, [partial(compiled, *inputs)], **more)
    row.note = row.note or note
    set_speed_up(row, loop_graph)
    report.say(format_row(row))
    timing = time_eager({"compiled": partial(compiled, *inputs)}, rounds=bench.rounds)["compiled"]
    row = bench.eager_row(section, "compiled loop", SEED, timing, **more)
    set_speed_up(row, loop_eager)
    report.say(format_row(row))
    report.say()


def measure_cpu(report: Report, model: torch.nn.Module, quick: bool) -> None:
    """No GPU: the reference loop against our CPU kernel, wall time, taken in turn."""
    section = "cpu"
    loop = Model()
    report.say(f"CPU, float32, {torch.get_num_threads()} threads, us per call (wall)")
    report.say(f"{'(B, T, H, D)':20}{'loop':>12}{'+-':>7}{'ours':>12}{'+-':>7}{'speed-up':>10}{'error':>10}")
    for problem in CPU_PROBLEMS:
        inputs = make_inputs(problem, "cpu")
        error = relative_error(model(*inputs), oracle_of(inputs))
        shape = f"({problem.B}, {problem.T}, {problem.H}, {problem.D})"
        if not report.check(problem, "sigmoid", error):
            note = f"WRONG, {TOLERANCE[problem.dtype]:.1e} is allowed; not timed"
            report.add(Row(section, "gated_delta_jit", "eager", str(problem), error=error, note=note))
            report.say(f"{shape:20}{'-':>12}{'-':>7}{'-':>12}{'-':>7}{'-':>10}{error:>10.1e}  {note}")
            continue
        calls = {"loop": partial(loop, *inputs), "ours": partial(model, *inputs)}
        timings = time_eager(calls, rounds=3 if quick else 9, round_seconds=0.05)
        rows = {}
        for key, name in (("loop", "reference loop"), ("ours", "gated_delta_jit")):
            timing = timings[key]
            rows[key] = report.add(Row(section, name, "eager", str(problem), us=timing.us, spread=timing.spread))
            rows[key].speed_up = timings["loop"].us / timing.us
        rows["ours"].error = error
        report.say(
            f"{shape:20}{timings['loop'].us:>12.1f}{100 * timings['loop'].spread:>6.1f}%"
            f"{timings['ours'].us:>12.1f}{100 * timings['ours'].spread:>6.1f}%"
            f"{rows['ours'].speed_up:>9.1f}x{error:>10.1e}"
        )
    report.say()


# ----------------------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------------------


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe(library: ModuleType, on_gpu: bool, fla: str) -> dict[str, str]:
    environment = {
        "date": datetime.date.today().isoformat(),
        "gated_delta_jit": library.__version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "triton": triton.__version__ if triton is not None else "not installed",
        "python": platform.python_version(),
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = f"sm_{properties.major}{properties.minor}"
        environment["GPU"] = f"{properties.name} ({capability}, {properties.multi_processor_count} SMs)"
        environment["FLA"] = fla
    else:
        environment["CPU"] = f"{processor_name()}, {torch.get_num_threads()} threads"
    return environment


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    description, _, method = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats")
    parser.add_argument("--torch-compile", action="store_true", help="add the loop under torch.compile (minutes)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--no-fla", action="store_true", help="leave flash-linear-attention out")
    # What precompile_fla starts its processes with.
    parser.add_argument("--fla-precompile", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.json:
        try:
            # Now rather than after minutes of measuring.
            Path(options.json).open("a").close()
        except OSError as error:
            parser.error(f"--json: {error}")
    return options


def gpu_sections(bench: Bench, options: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """The sections in the order in which they run."""
    problems = short_problems(options.quick)
    yield partial(measure_limits, bench)
    yield partial(measure_seed, bench)
    if bench.peers:
        yield partial(precompile_fla, [SEED, *problems])
        yield partial(measure_seed_peers, bench)
    yield partial(measure_short, bench, problems)
    if options.torch_compile:
        yield partial(measure_compiled_loop, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.fla_precompile:
        return precompile_fla_here(options.fla_precompile)
    try:
        # Here and not at the top: the first import compiles, which --help should not.
        import gated_delta_jit
    except RuntimeError as error:
        progress(f"gated_delta_jit could not be imported\n{error}")
        return 1

    on_gpu = torch.cuda.is_available() and gated_delta_jit.HAS_CUDA
    if torch.cuda.is_available() and not on_gpu:
        progress("there is a GPU, but gated_delta_jit has no CUDA part (is nvcc on PATH?): timing the CPU")
    if options.torch_compile and not on_gpu:
        progress("--torch-compile is for GPUs and is left out")
    peers: list[Peer] = []
    fla = "left out"
    if on_gpu and not options.no_fla:
        peers, fla = load_fla()
    report = Report(describe(gated_delta_jit, on_gpu, fla))
    for name, value in report.environment.items():
        report.say(f"{name:16}{value}")
    report.say()

    model = gated_delta_jit.ModelNew()
    status = 0
    try:
        check_results(report, model, "cuda" if on_gpu else "cpu")
        if report.wrong:
            sections: Iterator[Callable[[], None]] = iter(())
        elif on_gpu:
            sections = gpu_sections(Bench(report, model, peers, options.quick), options)
        else:
            sections = iter([partial(measure_cpu, report, model, options.quick)])
        for section in sections:
            section()
    except KeyboardInterrupt:
        progress("interrupted; what was measured stands above")
        status = 130
    finally:
        if options.json:
            report.write_json(options.json)
    if report.wrong:
        progress("WRONG RESULT, see above")
        return 1
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
