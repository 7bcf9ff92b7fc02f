"""Is gated_delta_jit right on this machine, how fast is it, against what, and how far from the limit?

    python bench.py                   the whole run: 30 s on a CPU, minutes on a GPU (most of them tune FLA)
    python bench.py --quick           fewer shapes and repeats
    python bench.py --backward        forward plus backward, in place of the forward alone
    python bench.py --no-fla          without flash-linear-attention
    python bench.py --torch-compile   adds the reference loop under torch.compile, which compiles for minutes
    python bench.py --json FILE       writes everything that was measured to FILE
    python bench.py --only SECTION    one of seed, short, throughput and grid, alone
    python bench.py --grid            adds 300 sizes from one head and one step to a thousand heads of 8192 steps
    python bench.py --shapes B,T,H,D[:DTYPE[:GATE DTYPE]] ...
                                      these in place of the training shapes of throughput and --backward
    python bench.py --dtype DTYPE     this type for all of them but "seed", and for --shapes that name none

Sections: "seed" is the shape of the original loop, beside the loop itself, torch.add and the limits of the machine;
"short" many small shapes; "throughput" shapes of real training runs, where memory traffic should count and nothing
else; "grid" one line for each size, measured for some 30 ms each.

Method: the result is compared with a float64 oracle before anything is timed; the exit status is 1 when it is wrong.
"graph" is the time per call inside a replayed CUDA graph (GPU time, no launch cost from Python), "eager" the wall time
per call as a program sees it. All figures are medians, +- is half the distance between the quartiles. Inputs that fit
well into L2 stay there; larger ones rotate through enough buffer sets to exceed it. The floor is a kernel that touches
every input and output byte once or, for buffers that exceed L2, the bytes over the copy rate; both are measured in the
same run. At large shapes the oracle takes some of the heads, and all others must be finite. With --backward every
gradient is judged alone and for each kind of gate, and the floor is always the bytes over the copy rate: forward 4
arrays in and 1 out, backward 5 in and 4 out. Tables go to stdout, progress to stderr. Ctrl-C keeps what was measured.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
# The same where tensor cores compute: half-precision operands are rounded on the way, float32 ones are split in parts.
TENSOR_CORE_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# The same of each gradient alone.
GRADIENT_TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GRADIENTS = ("dq", "dk", "dv", "dgate", "dstate")  # dstate: of the initial state
# A peer further off than this is shown as wrong and not timed. TF32 and bf16 states stay well below.
PEER_LIMIT = 3e-2
# A peer that takes longer than this for one call is not timed, in seconds.
PEER_SECONDS = 0.05

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[], object]
Gradients = Sequence[torch.Tensor]  # in the order of GRADIENTS, the last one often absent
Errors = dict[str, dict[str, float]]  # by kind of gate, then by gradient


# ----------------------------------------------------------------------------------------------------------------------
# Problems and inputs
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One size: q, k, v, gate and y all have shape (B, T, H, D). The gate has its own type where one is given."""

    B: int
    T: int
    H: int
    D: int
    dtype: torch.dtype = torch.float32
    own_gate_dtype: torch.dtype | None = None

    @property
    def gate_dtype(self) -> torch.dtype:
        return self.own_gate_dtype or self.dtype

    @property
    def elements(self) -> int:
        """Of each array."""
        return self.B * self.T * self.H * self.D

    @property
    def bytes(self) -> int:
        """Every input byte once and every output byte once."""
        return (4 * self.dtype.itemsize + self.gate_dtype.itemsize) * self.elements

    @property
    def training_bytes(self) -> int:
        """The forward's bytes, then q, k, v, gate and dy once and their four gradients once."""
        return (11 * self.dtype.itemsize + 3 * self.gate_dtype.itemsize) * self.elements

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)

    @property
    def types(self) -> str:
        """Short, for tables: "bf16", or "bf16+f32" with another type of gate."""
        own = self.gate_dtype != self.dtype
        return SHORT_NAMES[self.dtype] + (f"+{SHORT_NAMES[self.gate_dtype]}" if own else "")

    def __str__(self) -> str:
        gate = f", gate {name_of(self.gate_dtype)}" if self.gate_dtype != self.dtype else ""
        return f"({self.B}, {self.T}, {self.H}, {self.D}) {self.dtype_name}{gate}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SHORT_NAMES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "fp16", torch.bfloat16: "bf16"}


SEED = Problem(B=2, T=128, H=4, D=24)
CPU_PROBLEMS = [SEED, Problem(B=1, T=1024, H=8, D=64), Problem(B=4, T=256, H=8, D=64)]


def short_problems(quick: bool, dtypes: Sequence[torch.dtype]) -> list[Problem]:
    """K = V from 16 to 64, T from 64 to 512, 8 and 64 pairs (b, h): where launch and latency count as much as bytes."""
    sizes = [16, 64] if quick else [16, 32, 64]
    lengths = [128] if quick else [64, 128, 256, 512]
    return [Problem(B, T, 8, D, dtype) for dtype in dtypes for D in sizes for T in lengths for B in (1, 8)]


MEMORY_PROBLEM = Problem(B=8, T=2048, H=16, D=64, dtype=torch.bfloat16)


def training_problems(quick: bool) -> list[Problem]:
    """Sizes of real training runs, forward plus backward."""
    problems = [MEMORY_PROBLEM, Problem(B=8, T=2048, H=16, D=64)]
    if not quick:
        problems.append(Problem(B=8, T=2048, H=16, D=128, dtype=torch.bfloat16))
        problems.append(Problem(B=1, T=32768, H=16, D=128, dtype=torch.bfloat16))
    return problems


def throughput_problems(quick: bool) -> list[Problem]:
    """Sizes of real training runs, forward alone."""
    bf16 = torch.bfloat16
    problems = [
        Problem(8, 2048, 16, 64, bf16),
        Problem(16, 2048, 16, 64, bf16),
        Problem(8, 2048, 16, 128, bf16),
        Problem(16, 2048, 32, 128, bf16),
        Problem(8, 2048, 16, 64),
        Problem(8, 2048, 16, 128),
        Problem(1, 32768, 16, 128, bf16),
        Problem(1, 8192, 8, 64, bf16),
        Problem(4, 4096, 16, 256, bf16),
        Problem(8, 2047, 16, 64, bf16),
        Problem(8, 2048, 16, 64, torch.float16),
        Problem(8, 2048, 16, 64, bf16, torch.float32),
    ]
    return problems[:8:2] if quick else problems


def grid_problems(quick: bool, dtypes: Sequence[torch.dtype]) -> list[Problem]:
    """From one pair (b, h) and one step to 1024 pairs of 8192 steps; at most 16 heads a batch."""
    pairs = [1, 16, 256] if quick else [1, 4, 16, 64, 256, 1024]
    lengths = [1, 128, 8192] if quick else [1, 16, 128, 1024, 8192]
    sizes = [16, 64, 128] if quick else [16, 32, 64, 128, 256]
    points = itertools.product(dtypes, sizes, lengths, pairs)
    return [Problem(max(1, n // 16), T, min(n, 16), D, dtype) for dtype, D, T, n in points]


def in_dtype(problems: Sequence[Problem], dtype: torch.dtype | None) -> list[Problem]:
    """The same sizes in one type, each once; a float32 gate stays beside half precision. None: as they are."""
    if dtype is None:
        return list(problems)
    changed = [replace(problem, dtype=dtype, own_gate_dtype=gate_beside(dtype, problem)) for problem in problems]
    return list(dict.fromkeys(changed))


def gate_beside(dtype: torch.dtype, problem: Problem) -> torch.dtype | None:
    return problem.own_gate_dtype if dtype.itemsize == 2 else None


def on_tensor_cores(problem: Problem) -> bool:
    """Whether the tensor-core kernel may serve this problem on a GPU. Problems as small as the seed never take it."""
    elements = problem.B * problem.H * problem.D**2
    widest = 128 if problem.dtype == torch.float32 else 256
    fits = problem.dtype in TENSOR_CORE_TOLERANCE and problem.D % 8 == 0 and problem.D <= widest
    return fits and problem.T >= 16 and (elements >= 16384 or problem.T >= 2048)


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "10 % zeros": lambda x: torch.where(x > 1.2816, 0.0, torch.sigmoid(x)),
    "negative": torch.tanh,
    "around 1": lambda x: 1 + 0.05 * torch.tanh(x),
    "around 1e-4": lambda x: 1e-4 * torch.exp(0.5 * x),
    "around 1e-20": lambda x: 1e-20 * torch.exp(0.5 * x),
}
# The kinds that gradients are judged with. Heads don't mix, so that one call serves all: head h has kind h % 4.
MIXED_GATES = ("sigmoid", "around 1e-4", "around 1e-20", "10 % zeros")


def mixed_gates(x: torch.Tensor) -> torch.Tensor:
    gate = torch.empty_like(x)
    for i, gates in enumerate(MIXED_GATES):
        heads = slice(i, None, len(MIXED_GATES))
        gate[:, :, heads] = GATES[gates](x[:, :, heads])
    return gate


def make_inputs(problem: Problem, device: str, seed: int = 0, gates: str = "sigmoid") -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.B, problem.T, problem.H, problem.D)

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, v = (normal().to(problem.dtype) for _ in range(3))
    x = normal()
    gate = mixed_gates(x) if gates == "mixed" else GATES[gates](x)
    return q, k, v, gate.to(problem.gate_dtype)


def make_dy(problem: Problem, device: str, seed: int = 0) -> torch.Tensor:
    """What arrives at y from the loss."""
    generator = torch.Generator(device).manual_seed(1000 + seed)
    shape = (problem.B, problem.T, problem.H, problem.D)
    return torch.randn(shape, generator=generator, device=device).to(problem.dtype)


def oracle_of(inputs: Inputs, stretch: int = 256, lead: int = 128) -> torch.Tensor:
    """y in float64, by the reference loop.

    Long sequences whose gates forget are cut in stretches that the loop takes side by side, each with `lead` steps in
    front and a state of zeros before them: over those steps every product of gates must be below 1e-20, far less than
    float64 resolves. Else the loop takes all of time in one go.
    """
    sequences = [x.double() for x in inputs]
    B, T = inputs[0].shape[:2]
    if T <= 2 * stretch:
        return gated_delta_reference(*sequences)[0]
    count = math.ceil(T / stretch)
    # In front of the first stretch lie zeros.
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, lead, count * stretch - T)) for x in sequences]
    parts = [x.unfold(1, lead + stretch, stretch).movedim(-1, 2).flatten(0, 1) for x in padded]
    kept = parts[3].unflatten(0, (B, count))[:, 1:, :lead].prod(dim=2).abs().max().item()
    if not kept < 1e-20:
        return gated_delta_reference(*sequences)[0]
    y = gated_delta_reference(*parts)[0][:, lead:]
    return y.unflatten(0, (B, count)).flatten(1, 2)[:, :T]


@dataclass(frozen=True)
class Judge:
    """The oracle of some of the batches and heads of a problem, the last ones included."""

    oracle: torch.Tensor
    shape: torch.Size
    chosen: tuple[slice, slice, slice]

    @staticmethod
    def of(inputs: Inputs, limit: float = 1e10) -> "Judge":
        """`limit`: of state elements times steps that the oracle's loop may walk through."""
        B, T, H, K = inputs[0].shape
        shape = inputs[2].shape
        pairs = max(1, int(limit / (T * K * shape[-1])))
        # Heads are thinned out first, then batches.
        head_stride = min(H, math.ceil(B * H / pairs))
        batch_stride = min(B, math.ceil(B * math.ceil(H / head_stride) / pairs))
        batches = slice((B - 1) % batch_stride, None, batch_stride)
        heads = slice((H - 1) % head_stride, None, head_stride)
        chosen = (batches, slice(None), heads)
        return Judge(oracle_of(tuple(x[chosen] for x in inputs)), shape, chosen)

    def error(self, y: torch.Tensor) -> float:
        """Relative error of what was chosen; NaN when anything at all is not finite."""
        if y.shape != self.shape:
            return math.inf
        if not torch.isfinite(y).all():
            return math.nan
        return relative_error(y[self.chosen], self.oracle)


def oracle_gradients(
    inputs: Inputs,
    dy: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    dfinal_state: torch.Tensor | None = None,
    stretch: int = 64,
) -> list[torch.Tensor]:
    """The five gradients in float64: autograd through the reference loop, `stretch` steps at a time from the last back.

    All of time at once would keep every step's state, and PyTorch's gradient of a slice is as large as what it was cut
    from, which makes the work quadratic in T.
    """
    sequences = [x.double() for x in (*inputs, dy)]
    B, T, H, K = inputs[0].shape
    zeros = sequences[0].new_zeros(B, H, K, inputs[2].shape[-1])
    parts = [[x[:, start : start + stretch] for x in sequences] for start in range(0, T, stretch)]
    states = [zeros if initial_state is None else initial_state.double()]
    with torch.no_grad():
        for *part, _ in parts[:-1]:
            states.append(gated_delta_reference(*part, initial_state=states[-1], output_final_state=True)[1])
    dstate = zeros if dfinal_state is None else dfinal_state.double()
    gradients = []
    for (*part, part_dy), state in zip(reversed(parts), reversed(states), strict=True):
        leaves = [x.detach().requires_grad_() for x in (*part, state)]
        results = gated_delta_reference(*leaves[:4], initial_state=leaves[4], output_final_state=True)
        *gradients_here, dstate = torch.autograd.grad(results, leaves, (part_dy, dstate))
        gradients.append(gradients_here)
    gradients.reverse()
    return [torch.cat(list(each), dim=1) for each in zip(*gradients, strict=True)] + [dstate]


def relative_error(y: torch.Tensor, oracle: torch.Tensor) -> float:
    """Norm of the error over norm of the oracle; infinite for a wrong shape, NaN when y holds a NaN.

    Where the oracle is all zeros (gates that a dtype rounds to 0), so must y be.
    """
    if y.shape != oracle.shape:
        return math.inf
    error = (y.double() - oracle).norm().item()
    size = oracle.norm().item()
    if size == 0:
        return error if error == 0 else math.inf
    return error / size


def gradient_errors(gradients: Gradients, oracle: Gradients) -> Errors:
    """Each gradient alone for each kind of gate; the gates must be "mixed"."""
    errors: Errors = {}
    for i, gates in enumerate(MIXED_GATES):
        heads = slice(i, None, len(MIXED_GATES))
        errors[gates] = {}
        for name, gradient, expected in zip(GRADIENTS, gradients, oracle, strict=False):
            axis = 1 if name == "dstate" else 2
            error = relative_error(gradient.movedim(axis, 0)[heads], expected.movedim(axis, 0)[heads])
            errors[gates][name] = error
    return errors


def worst(errors: Iterable[float]) -> float:
    return max(errors, key=lambda error: (math.isnan(error), error))


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
    error: float | None = None  # of y or, in training, of the worst gradient with sigmoid gates
    errors: Errors | None = None  # of the gradients
    speed_up: float | None = None  # against the reference loop timed the same way
    floor_us: float | None = None
    peak_bytes: int | None = None
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
    on_gpu: bool = False
    checks: list[dict[str, object]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    wrong: bool = False

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def summarise(self, text: str) -> None:
        self.summary.append(text)
        self.say(text)

    def tolerance(self, problem: Problem) -> float:
        """Of y, by the kernel that may serve the problem."""
        looser = self.on_gpu and on_tensor_cores(problem)
        return (TENSOR_CORE_TOLERANCE if looser else TOLERANCE)[problem.dtype]

    def check(self, problem: Problem, gates: str, error: float, of: str = "y") -> bool:
        """Record ours against the oracle; False when it is out of tolerance (NaN is). `of`: y or a gradient."""
        tolerance = self.tolerance(problem) if of == "y" else GRADIENT_TOLERANCE[problem.dtype]
        right = error <= tolerance
        self.wrong = self.wrong or not right
        self.checks.append(
            {"problem": str(problem), "of": of, "gates": gates, "error": error, "tolerance": tolerance, "right": right}
        )
        return right

    def check_gradients(self, problem: Problem, errors: Errors) -> bool:
        rights = [
            self.check(problem, gates, error, of=name)
            for gates, by_name in errors.items()
            for name, error in by_name.items()
        ]
        return all(rights)

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


ERRORS_HEADER = f"{'gates':14}" + "".join(f"{name:>10}" for name in GRADIENTS)


def format_errors(errors: dict[str, float], limit: float = math.inf) -> str:
    """The cells of one kind of gate; ! marks what is over the limit."""
    cells = [number(errors.get(name), ".1e", "" if errors.get(name, 0) <= limit else " !") for name in GRADIENTS]
    return "".join(f"{cell:>10}" for cell in cells)


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
    take longer than `limit_seconds`, fewer are run; a single call that takes as long is warmed up once and timed once.
    """
    counts: dict[str, int] = {}
    warm_up_rounds = 1
    for name, call in calls.items():
        # The first call warms up, the second is an estimate.
        for _ in range(2):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            per_call = time.perf_counter() - start
            if per_call > limit_seconds:
                warm_up_rounds = 0
                break
        counts[name] = max(1, min(1000, round(round_seconds / per_call)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    deadline = time.perf_counter() + limit_seconds
    try:
        for round_index in range(warm_up_rounds + rounds):
            if round_index > warm_up_rounds and time.perf_counter() > deadline:
                break
            for name, call in calls.items():
                count = counts[name]
                synchronize()
                start = time.perf_counter()
                for _ in itertools.repeat(None, count):
                    call()
                synchronize()
                seconds = time.perf_counter() - start
                if round_index >= warm_up_rounds:
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


def time_graph(calls: Sequence[Call], quick: bool = False, seconds: float | None = None) -> Timing:
    """GPU time per call in a replayed CUDA graph; `calls` holds the same call on one or more sets of buffers.

    A graph holds enough calls (at most about 100) for 0.4 ms, so that the gap between replays does not count. With
    `seconds` the measurement takes about so long, at the price of precision.
    """
    estimates = 3 if seconds else 5
    warm = seconds / 3 if seconds else 0.03
    least, duration = (3, seconds) if seconds else (12, 0.02 if quick else 0.06)
    # On a side stream: autograd remembers streams, and a capture must not meet the default one.
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for call in calls:
            # Twice: the first call may compile or tune, which a capture does not allow.
            call()
            call()
    torch.cuda.synchronize()
    sets = len(calls)
    count = sets
    while True:
        graph = CallGraph(calls, count)
        graph.replay(estimates - 2)
        per_call = max(1e-7, statistics.median(graph.replay(estimates)))
        wanted = sets * max(1, round(min(400e-6 / per_call, 100) / sets))
        # A short graph shows mostly the gap between replays, so the estimate is taken again on a longer one.
        if wanted <= 1.5 * count:
            break
        del graph
        count = wanted
    per_replay = count * per_call
    # The clock of an idle GPU needs some 30 ms of work to rise.
    graph.replay(max(1, min(300, math.ceil(warm / per_replay))))
    repeats = max(least, min(200, math.ceil(duration / per_replay)))
    # The first replays run while the host has no lead yet.
    return Timing(graph.replay(repeats + 2)[2:])


def cache_bytes() -> int:
    """Of L2."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return getattr(properties, "L2_cache_size", 0) or 64 << 20


def buffer_sets(problem: Problem) -> int:
    """One set while inputs and output fit well into L2, else enough to exceed twice its size."""
    cache = cache_bytes()
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
# Training steps
# ----------------------------------------------------------------------------------------------------------------------


def training_step(
    function: Callable[..., torch.Tensor], inputs: Inputs, dy: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Forward and backward of `function` through autograd. The call returns the gradients of q, k, v, gate.

    The inputs are leaves that stay where they are, so that the call can be captured.
    """
    leaves = tuple(x.detach().requires_grad_() for x in inputs)

    def call() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, dy)

    return call


def null_function(inputs: Inputs) -> Callable[..., torch.Tensor]:
    """What autograd alone costs: a function with our operator's signature whose results are ready beforehand."""
    ready_y = torch.zeros_like(inputs[2])
    ready_gradients = tuple(torch.zeros_like(x) for x in inputs)

    class Null(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, gate, initial_state, scale, output_final_state, log_gate):
            return ready_y

        @staticmethod
        def backward(ctx, dy):
            return (*ready_gradients, None, None, None, None)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return Null.apply(q, k, v, gate, None, 1.0, False, False)

    return call


def all_gradients(
    operator: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: Inputs,
    initial_state: torch.Tensor,
    dy: torch.Tensor,
    dfinal_state: torch.Tensor,
) -> Gradients:
    """Ours, all five, with gradients that arrive through y and through the final state."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, initial_state)]
    results = operator(*leaves[:4], initial_state=leaves[4], output_final_state=True)
    return torch.autograd.grad(results, leaves, (dy, dfinal_state))


def judge_ours(
    report: Report,
    library: ModuleType,
    problem: Problem,
    inputs: Inputs,
    dy: torch.Tensor,
    oracle: Gradients,
) -> tuple[Errors, bool]:
    """The call that is timed, and one with a state, which here is zero as is its gradient: the oracle is the same."""
    errors = gradient_errors(training_step(library.ModelNew(), inputs, dy)(), oracle)
    zeros = torch.zeros_like(oracle[4], dtype=torch.float64 if problem.dtype == torch.float64 else torch.float32)
    with_state = gradient_errors(all_gradients(library.gated_delta, inputs, zeros, dy, zeros), oracle)
    right = report.check_gradients(problem, errors)
    right = report.check_gradients(problem, with_state) and right
    for gates in errors:
        errors[gates]["dstate"] = with_state[gates]["dstate"]
    return errors, right


# ----------------------------------------------------------------------------------------------------------------------
# Peers: flash-linear-attention
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """Another implementation. `prepare` does what a caller does once, untimed, and returns the timed call.

    `prepare_training` likewise for a training step, with dy as fifth argument; the timed call returns the gradients of
    q, k, v and of the gate's logarithm.
    """

    name: str
    prepare: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]
    prepare_training: Callable[..., Callable[[], tuple[torch.Tensor, ...]]]


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
        from fla.ops.gsa.chunk_bwd import chunk_gsa_bwd_k
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

    def prepare_recurrent_training(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, dy: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gate: torch.Tensor) -> torch.Tensor:
            return fused_recurrent(q, k, v, gv=log_gate, scale=1.0)[0]

        return training_step(function, (q, k, v, gate.float().log()), dy)

    def prepare_chunk_training(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, dy: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        # FLA has no autograd around this half of Gated Slot Attention: its two parts are called one after the other.
        log_gate = gate.float().log()

        def call() -> tuple[torch.Tensor, ...]:
            summed = chunk_local_cumsum(log_gate, chunk_size=64, scale=RCP_LN2)
            h, _, y = chunk_gsa_fwd_k(q, k, v, summed, scale=1.0, chunk_size=64)
            # What the other half adds to the log gate's gradient; overwritten.
            dlog_gate = torch.zeros_like(log_gate)
            return chunk_gsa_bwd_k(
                q=q,
                k=k,
                v=v,
                g=summed,
                h=h,
                h0=None,
                o=y,
                do=dy,
                dht=None,
                dg=dlog_gate,
                scale=1.0,
                chunk_size=64,
            )[:4]

        return call

    peers = [
        Peer(FLA_RECURRENT, prepare_recurrent, prepare_recurrent_training),
        Peer(FLA_CHUNK, prepare_chunk, prepare_chunk_training),
    ]
    return peers, version


def precompile_fla(problems: Sequence[Problem], backward: bool = False) -> None:
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
                if backward:
                    command.append("--backward")
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


def precompile_fla_here(case: str, backward: bool) -> int:
    """The child process of precompile_fla: run each of FLA's implementations once."""
    B, T, H, D, dtype_name = case.split(",")
    problem = Problem(int(B), int(T), int(H), int(D), getattr(torch, dtype_name))
    inputs = make_inputs(problem, "cuda")
    for peer in load_fla()[0]:
        try:
            if backward:
                peer.prepare_training(*inputs, make_dy(problem, "cuda"))()
            else:
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
    report.say(f"{'gates':14}" + "".join(f"{name_of(dtype):>12}" for dtype in TOLERANCE))
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
    allowed = [report.tolerance(replace(SEED, dtype=dtype)) for dtype in TOLERANCE]
    report.say(f"{'allowed':14}" + "".join(f"{tolerance:>12.1e}" for tolerance in allowed))
    if report.wrong:
        report.say("WRONG: the figures marked ! are out of tolerance. Nothing is timed.")
    report.say()


def check_gradients(report: Report, library: ModuleType, device: str) -> None:
    """The five gradients at the seed's shape through y and a final state, from a random initial state."""
    report.say("Gradients at (B, T, H, D) = (2, 128, 4, 24), each alone: norm of the error / norm of the float64 one")
    report.say(f"{'dtype':10}{ERRORS_HEADER}{'allowed':>10}")
    for dtype, tolerance in GRADIENT_TOLERANCE.items():
        problem = Problem(SEED.B, SEED.T, SEED.H, SEED.D, dtype)
        inputs = make_inputs(problem, device, seed=1, gates="mixed")
        dy = make_dy(problem, device, seed=1)
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        generator = torch.Generator(device).manual_seed(2)
        shape = (problem.B, problem.H, problem.D, problem.D)
        state, dstate = (torch.randn(shape, generator=generator, device=device, dtype=state_dtype) for _ in range(2))
        oracle = oracle_gradients(inputs, dy, state, dstate)
        # The allocator hands these blocks out again: an element that is not written stays NaN.
        poison = [torch.full_like(x, math.nan) for x in (*inputs, state)]
        del poison
        errors = gradient_errors(all_gradients(library.gated_delta, inputs, state, dy, dstate), oracle)
        report.check_gradients(problem, errors)
        for gates, by_name in errors.items():
            report.say(f"{problem.dtype_name:10}{gates:14}{format_errors(by_name, tolerance)}{tolerance:>10.1e}")
    if report.wrong:
        report.say("WRONG: the figures marked ! are out of tolerance. Nothing is timed.")
    report.say()


@dataclass
class Bench:
    """What the GPU sections share."""

    report: Report
    library: ModuleType
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

    def training_floor(self, problem: Problem) -> float:
        return 1e6 * problem.training_bytes / self.bytes_per_second

    def graph_row(
        self,
        section: str,
        name: str,
        problem: Problem,
        calls: Sequence[Call],
        seconds: float | None = None,
        **more: object,
    ) -> Row:
        """Time `calls` in a graph, for about `seconds` where given; a failure becomes the row's note."""
        row = Row(section, name, "graph", str(problem), buffer_sets=len(calls), **more)
        try:
            timing = time_graph(calls, self.quick, seconds)
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
    note = "" if report.check(SEED, "sigmoid", error) else f"WRONG, {report.tolerance(SEED):.1e} is allowed"
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
        call, row = try_peer(section, peer, SEED, [inputs], partial(relative_error, oracle=oracle))
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
    section: str,
    peer: Peer,
    problem: Problem,
    buffers: Sequence[Inputs],
    error_of: Callable[[torch.Tensor], float],
) -> tuple[list[Call], Row]:
    """The peer's timed calls, one for each buffer set; none, and a note in the row, if it fails, is wrong or too slow.

    `error_of` belongs to the first buffer set.
    """
    row = Row(section, peer.name, "graph", str(problem), buffer_sets=len(buffers))
    calls: list[Call] = []
    try:
        timed = [peer.prepare(*inputs) for inputs in buffers]
        row.error = error_of(timed[0]())
        seconds = seconds_of(timed[0])
    except Exception as failure:  # a peer that fails is a result
        row.note = brief(failure)
        return calls, row
    if not row.error <= PEER_LIMIT:
        row.note = "wrong result, not timed"
    elif seconds > PEER_SECONDS:
        row.note = f"{1e3 * seconds:.0f} ms a call, not timed"
    else:
        calls.extend(timed)
    return calls, row


def seconds_of(call: Call) -> float:
    """Wall time of one call that has been warmed up."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


TABLE_HEADER = (
    f"{'dtype':9}{'B':>4}{'T':>6}{'H':>4}{'K=V':>5}{'sets':>5}{'floor':>9}{'ours':>9}{'+-':>6}{'of floor':>9}"
    f"{'error':>9}{'FLA rec.':>10}{'error':>9}{'FLA chunk':>10}{'error':>9}{'speed-up':>9}"
)


def measure_short(bench: Bench, problems: Sequence[Problem]) -> None:
    """Ours against both FLA paths over short sequences, in graphs, one line for each problem."""
    report = bench.report
    report.say("Short shapes, us per call in a CUDA graph; speed-up against the faster of FLA's two implementations")
    measure_table(bench, "short", problems)


def measure_throughput(bench: Bench, problems: Sequence[Problem]) -> None:
    """Ours against the floor and both FLA paths at sizes of real training runs."""
    report = bench.report
    report.say("Training shapes, forward, us per call in a CUDA graph; speed-up against the faster of FLA's two")
    rows = measure_table(bench, "throughput", problems)
    shares = [row.floor_share for row in rows if row.floor_share is not None]
    if shares:
        report.summarise(f"Training shapes: {percent(min(shares))} to {percent(max(shares))} of the floor.")
        report.say()


def measure_table(bench: Bench, section: str, problems: Sequence[Problem]) -> list[Row]:
    """One line for each problem; returns the rows of ours."""
    report = bench.report
    report.say(TABLE_HEADER)
    notes: dict[str, None] = {}
    slower = 0
    compared = 0
    rows: list[Row] = []
    for problem in problems:
        ours, peers, floor_us = measure_forward(bench, section, problem)
        rows.append(ours)
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
            f"{problem.types:9}{problem.B:>4}{problem.T:>6}{problem.H:>4}{problem.D:>5}{ours.buffer_sets:>5}"
            f"{floor_us:>9.2f}{number(ours.us):>9}{percent(ours.spread):>6}{percent(ours.floor_share):>9}"
            f"{number(ours.error, '.1e'):>9}{cells}{number(speed_up, '.1f', 'x'):>9}"
        )
    for note in notes:
        report.say(f"  {note}")
    report.say()
    if compared:
        report.summarise(
            f"Faster than both FLA implementations at {compared - slower} of {compared} shapes of {section}."
        )
        report.say()
    return rows


def judge_forward(bench: Bench, section: str, problem: Problem, buffers: Sequence[Inputs]) -> tuple[Row, Judge]:
    """Ours on the first buffer set against the oracle, in poisoned memory; a row with a note where it is wrong."""
    judge = Judge.of(buffers[0])
    # The allocator hands this block out again: an element that is not written stays NaN.
    poison = torch.full_like(buffers[0][2], math.nan)
    del poison
    row = Row(section, "gated_delta_jit", "graph", str(problem), buffer_sets=len(buffers))
    row.error = judge.error(bench.model(*buffers[0]))
    if not bench.report.check(problem, "sigmoid", row.error):
        row.note = f"WRONG, {bench.report.tolerance(problem):.1e} is allowed; not timed"
    return row, judge


def forward_floor(bench: Bench, section: str, problem: Problem, buffers: Sequence[Inputs], **more: object) -> float:
    """Microseconds that the bytes take: those of the touch kernel where they fit into L2, else at the copy rate."""
    if triton is not None and problem.bytes < cache_bytes() / 8:
        row = bench.graph_row(section, "every byte touched once", problem, [partial(touch, *buffers[0])], **more)
        if row.us is not None:
            return row.us
    return bench.floor_from_copy(problem)


def measure_forward(bench: Bench, section: str, problem: Problem) -> tuple[Row, dict[str, Row], float]:
    """Rows of ours and of each peer at one problem, and the floor in microseconds."""
    sets = buffer_sets(problem)
    peers: dict[str, Row] = {}
    try:
        buffers = [make_inputs(problem, "cuda", seed) for seed in range(sets)]
        ours, judge = judge_forward(bench, section, problem, buffers)
    except torch.cuda.OutOfMemoryError as failure:
        row = Row(section, "gated_delta_jit", "graph", str(problem), buffer_sets=sets, note=brief(failure))
        return bench.report.add(row), peers, bench.floor_from_copy(problem)
    floor_us = forward_floor(bench, section, problem, buffers)
    if ours.note:
        bench.report.add(ours)
    else:
        calls = [partial(bench.model, *inputs) for inputs in buffers]
        ours = bench.graph_row(section, ours.name, problem, calls, error=ours.error, floor_us=floor_us)

    for peer in bench.peers:
        timed, row = try_peer(section, peer, problem, buffers, judge.error)
        if timed:
            row = bench.graph_row(section, peer.name, problem, timed, error=row.error, floor_us=floor_us)
        else:
            bench.report.add(row)
        peers[peer.name] = row
        del timed
        free_memory()
    return ours, peers, floor_us


def free_memory() -> None:
    """Graphs and large problems leave blocks behind that fit no later one."""
    gc.collect()
    torch.cuda.empty_cache()


# A point of the grid: at most so much memory, so long a call, and about so much measuring.
GRID_BYTES = 40e9
GRID_CALL_SECONDS = 0.02
GRID_SECONDS = 0.03


def measure_grid(bench: Bench, problems: Sequence[Problem]) -> None:
    """Ours alone, one line for each problem that fits."""
    section = "grid"
    report = bench.report
    report.say("Grid, us per call in a CUDA graph, about 30 ms of measuring for each line")
    report.say(
        f"{'dtype':9}{'B*H':>5}{'T':>6}{'K=V':>5}{'sets':>5}"
        f"{'floor':>10}{'ours':>10}{'+-':>6}{'of floor':>9}{'error':>9}"
    )
    for problem in problems:
        try:
            row, floor_us = measure_point(bench, section, problem)
        except torch.cuda.OutOfMemoryError as failure:
            row = report.add(Row(section, "gated_delta_jit", "graph", str(problem), note=brief(failure)))
            floor_us = bench.floor_from_copy(problem)
            free_memory()
        report.say(
            f"{problem.types:9}{problem.B * problem.H:>5}{problem.T:>6}{problem.D:>5}{row.buffer_sets:>5}"
            f"{floor_us:>10.2f}{number(row.us):>10}{percent(row.spread):>6}{percent(row.floor_share):>9}"
            f"{number(row.error, '.1e'):>9}  {row.note}".rstrip()
        )
    report.say()


def measure_point(bench: Bench, section: str, problem: Problem) -> tuple[Row, float]:
    """Ours at one point of the grid, and its floor in microseconds; a note in the row where it is not timed."""
    # A set that is far larger than L2 leaves nothing there that the next call could use.
    sets = 1 if problem.bytes > 16 * cache_bytes() else buffer_sets(problem)
    floor_us = bench.floor_from_copy(problem)
    # Beside the buffers, the float32 numbers that they are drawn as.
    needed = sets * problem.bytes + 12 * problem.elements
    if needed > min(GRID_BYTES, 0.9 * torch.cuda.mem_get_info()[0]):
        row = Row(section, "gated_delta_jit", "graph", str(problem), note=f"needs {needed / 1e9:.0f} GB, left out")
        return bench.report.add(row), floor_us
    buffers = [make_inputs(problem, "cuda", seed) for seed in range(sets)]
    row, _ = judge_forward(bench, section, problem, buffers)
    seconds = seconds_of(partial(bench.model, *buffers[0]))
    if not row.note and seconds > GRID_CALL_SECONDS:
        row.note = f"{1e3 * seconds:.0f} ms a call, left out"
    if row.note:
        bench.report.add(row)
    else:
        more = {"seconds": GRID_SECONDS}
        floor_us = forward_floor(bench, section, problem, buffers, **more)
        calls = [partial(bench.model, *inputs) for inputs in buffers]
        row = bench.graph_row(section, row.name, problem, calls, error=row.error, floor_us=floor_us, **more)
    del buffers
    if problem.bytes > 1 << 28:
        free_memory()
    return row, floor_us


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


@dataclass
class Verdict:
    """How an implementation's gradients compare with the oracle's; a note says why it isn't timed."""

    errors: Errors = field(default_factory=dict)
    note: str = ""

    @property
    def columns(self) -> dict[str, object]:
        """For a Row: everything, and the worst gradient with sigmoid gates."""
        if not self.errors:
            return {"note": self.note}
        return {"error": worst(self.errors["sigmoid"].values()), "errors": self.errors, "note": self.note}


def judge_training(bench: Bench, problem: Problem) -> dict[str, Verdict]:
    """Ours and every peer by name, each gradient by kind of gate, printed.

    Peers are timed if q, k and v have the right gradients for sigmoid gates; their gate's gradient, which they get by
    way of a logarithm, is shown beside.
    """
    report = bench.report
    progress(f"gradients at {problem}: the oracle takes up to half a minute, a peer's first call up to a minute")
    inputs = make_inputs(problem, "cuda", seed=1, gates="mixed")
    dy = make_dy(problem, "cuda", seed=1)
    oracle = oracle_gradients(inputs, dy)
    verdicts: dict[str, Verdict] = {}
    report.say(f"Forward plus backward at (B, T, H, D) = {problem}, {problem.training_bytes / 1e6:.2f} MB in and out")
    report.say(f"{'error of each gradient':34}{ERRORS_HEADER}")

    errors, right = judge_ours(report, bench.library, problem, inputs, dy, oracle)
    note = "" if right else f"WRONG, {GRADIENT_TOLERANCE[problem.dtype]:.1e} is allowed; not timed"
    verdicts["gated_delta_jit"] = Verdict(errors, note)
    for gates, by_name in errors.items():
        report.say(f"{'gated_delta_jit':34}{gates:14}{format_errors(by_name, GRADIENT_TOLERANCE[problem.dtype])}")

    for peer in bench.peers:
        verdict = Verdict()
        verdicts[peer.name] = verdict
        try:
            dq, dk, dv, dlog_gate = peer.prepare_training(*inputs, dy)()
            dgate = dlog_gate.double() / inputs[3].double()
            verdict.errors = gradient_errors((dq, dk, dv, dgate), oracle)
        except Exception as failure:  # a peer that fails is a result
            verdict.note = brief(failure)
            report.say(f"{peer.name:34}{verdict.note}")
            continue
        if not all(verdict.errors["sigmoid"][name] <= PEER_LIMIT for name in ("dq", "dk", "dv")):
            verdict.note = "wrong result, not timed"
        for gates, by_name in verdict.errors.items():
            report.say(f"{peer.name:34}{gates:14}{format_errors(by_name)}")
    report.say()
    return verdicts


def training_step_of(bench: Bench, name: str, inputs: Inputs, dy: torch.Tensor) -> Call:
    """The training step of ours or of the peer of that name."""
    for peer in bench.peers:
        if peer.name == name:
            return peer.prepare_training(*inputs, dy)
    return training_step(bench.model, inputs, dy)


def measure_training_seed(bench: Bench) -> None:
    """Forward plus backward at the seed's shape: loop, autograd alone, ours and FLA, in a graph and eager."""
    section = "training, seed"
    report = bench.report
    verdicts = judge_training(bench, SEED)
    inputs = make_inputs(SEED, "cuda")
    dy = make_dy(SEED, "cuda")
    floor_us = bench.training_floor(SEED)
    report.say(ROW_HEADER)

    progress("reference loop, forward and backward, in a graph and eager")
    step = training_step(Model(), inputs, dy)
    loop_graph = bench.graph_row(section, "reference loop", SEED, [step], floor_us=floor_us)
    set_speed_up(loop_graph, loop_graph)
    report.say(format_row(loop_graph))
    timing = time_eager({"loop": step}, rounds=5, round_seconds=0.1)["loop"]
    loop_eager = bench.eager_row(section, "reference loop", SEED, timing, floor_us=floor_us)
    set_speed_up(loop_eager, loop_eager)
    report.say(format_row(loop_eager))

    graph_times: dict[str, float] = {}
    for name, verdict in verdicts.items():
        if verdict.note:
            row = report.add(Row(section, name, "graph", str(SEED), floor_us=floor_us, **verdict.columns))
            report.say(format_row(row))
            continue
        step = training_step_of(bench, name, inputs, dy)
        calls = {"step": step}
        if name == "gated_delta_jit":
            calls["null"] = training_step(null_function(inputs), inputs, dy)
        row = bench.graph_row(section, name, SEED, [step], floor_us=floor_us, **verdict.columns)
        set_speed_up(row, loop_graph)
        report.say(format_row(row))
        if row.us is not None:
            graph_times[name] = row.us
        timings = time_eager(calls, rounds=bench.rounds)
        row = bench.eager_row(section, name, SEED, timings["step"], floor_us=floor_us, **verdict.columns)
        set_speed_up(row, loop_eager)
        report.say(format_row(row))
        if name == "gated_delta_jit":
            row = bench.eager_row(section, "null autograd.Function", SEED, timings["null"])
            report.say(format_row(row))
            # Ratios within one round, as for torch.add.
            pairs = zip(timings["step"].samples, timings["null"].samples, strict=True)
            ratio = statistics.median(ours / null for ours, null in pairs)
            ours_us = timings["step"].us
    report.say()
    if not verdicts["gated_delta_jit"].note:
        report.summarise(
            f"{SEED}: eager: {ours_us:.2f} us a training step, {ratio:.2f} times the null autograd.Function."
        )
    summarise_training(report, SEED, graph_times, floor_us)


def summarise_training(report: Report, problem: Problem, graph_times: dict[str, float], floor_us: float) -> None:
    """Ours in a graph against the floor and the faster of the peers."""
    peers = dict(graph_times)
    ours = peers.pop("gated_delta_jit", None)
    if ours is not None:
        text = f"in a graph: {ours:.2f} us a training step, {percent(floor_us / ours)} of the floor ({floor_us:.2f} us)"
        if peers:
            text += f", {min(peers.values()) / ours:.2f} times as fast as the faster of FLA's two"
        report.summarise(f"{problem}: {text}.")
    report.say()


def measure_training(bench: Bench, problem: Problem) -> None:
    """Forward plus backward at a training shape, in graphs: ours and both FLA paths."""
    section = "training"
    report = bench.report
    verdicts = judge_training(bench, problem)
    sets = buffer_sets(problem)
    buffers = [(make_inputs(problem, "cuda", seed), make_dy(problem, "cuda", seed)) for seed in range(sets)]
    floor_us = bench.training_floor(problem)
    report.say(ROW_HEADER)
    graph_times: dict[str, float] = {}
    for name, verdict in verdicts.items():
        more = {"floor_us": floor_us, **verdict.columns}
        if verdict.note:
            row = report.add(Row(section, name, "graph", str(problem), buffer_sets=sets, **more))
        else:
            calls = [training_step_of(bench, name, inputs, dy) for inputs, dy in buffers]
            row = bench.graph_row(section, name, problem, calls, **more)
        report.say(format_row(row))
        if row.us is not None:
            graph_times[name] = row.us
    report.say()
    summarise_training(report, problem, graph_times, floor_us)


def measure_training_memory(bench: Bench, problem: Problem) -> None:
    """Peak memory of one training step, y and the four gradients included, above the inputs and dy."""
    section = "training, memory"
    report = bench.report
    inputs = make_inputs(problem, "cuda")
    dy = make_dy(problem, "cuda")
    report.say(f"Peak memory of a training step at {problem} above q, k, v, gate (or its logarithm) and dy")
    report.say(f"{'y and four gradients alone':34}{problem.bytes / 2**20:>8.0f} MiB")
    for name in ("gated_delta_jit", *(peer.name for peer in bench.peers)):
        row = Row(section, name, "eager", str(problem))
        try:
            row.peak_bytes = peak_memory(training_step_of(bench, name, inputs, dy))
        except Exception as failure:  # a peer that fails is a result
            row.note = brief(failure)
        report.add(row)
        mebibytes = None if row.peak_bytes is None else row.peak_bytes / 2**20
        report.say(f"{name:34}{number(mebibytes, '8.0f', ' MiB')}  {row.note}".rstrip())
    report.say()


def peak_memory(call: Call) -> int:
    """Bytes that `call` allocates at most at any time, its results included. The first call warms up."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


def measure_cpu(report: Report, library: ModuleType, problems: Sequence[Problem], quick: bool, backward: bool) -> None:
    """No GPU: the reference loop against our CPU kernel, wall time, taken in turn."""
    section = "cpu, training" if backward else "cpu"
    loop = Model()
    model = library.ModelNew()
    what = ", forward plus backward" if backward else ""
    report.say(f"CPU{what}, {torch.get_num_threads()} threads, us per call (wall)")
    report.say(f"{'(B, T, H, D)':40}{'loop':>12}{'+-':>7}{'ours':>12}{'+-':>7}{'speed-up':>10}{'error':>10}")
    for problem in problems:
        if backward and quick and problem == CPU_PROBLEMS[1]:
            # Backward through the loop is quadratic in T: most of a minute here.
            continue
        inputs = make_inputs(problem, "cpu")
        errors: Errors | None = None
        if backward:
            mixed = make_inputs(problem, "cpu", seed=1, gates="mixed")
            dy = make_dy(problem, "cpu")
            errors, right = judge_ours(report, library, problem, mixed, dy, oracle_gradients(mixed, dy))
            error = worst(itertools.chain.from_iterable(each.values() for each in errors.values()))
            tolerance = GRADIENT_TOLERANCE[problem.dtype]
            calls = {"loop": training_step(loop, inputs, dy), "ours": training_step(model, inputs, dy)}
        else:
            error = relative_error(model(*inputs), oracle_of(inputs))
            right = report.check(problem, "sigmoid", error)
            tolerance = report.tolerance(problem)
            calls = {"loop": partial(loop, *inputs), "ours": partial(model, *inputs)}
        shape = str(problem)
        if not right:
            note = f"WRONG, {tolerance:.1e} is allowed; not timed"
            report.add(Row(section, "gated_delta_jit", "eager", str(problem), error=error, errors=errors, note=note))
            report.say(f"{shape:40}{'-':>12}{'-':>7}{'-':>12}{'-':>7}{'-':>10}{error:>10.1e}  {note}")
            continue
        timings = time_eager(calls, rounds=3 if quick else 9, round_seconds=0.05)
        rows = {}
        for key, name in (("loop", "reference loop"), ("ours", "gated_delta_jit")):
            timing = timings[key]
            rows[key] = report.add(Row(section, name, "eager", str(problem), us=timing.us, spread=timing.spread))
            rows[key].speed_up = timings["loop"].us / timing.us
        rows["ours"].error = error
        rows["ours"].errors = errors
        report.say(
            f"{shape:40}{timings['loop'].us:>12.1f}{100 * timings['loop'].spread:>6.1f}%"
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


SECTIONS = ("seed", "short", "throughput", "grid")
DTYPE_NAMES = {
    **{name_of(dtype): dtype for dtype in TOLERANCE},
    **{short: dtype for dtype, short in SHORT_NAMES.items()},
    "f16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def parse_dtype(text: str) -> torch.dtype:
    if text not in DTYPE_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is no type; there are {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[text]


def parse_shape(text: str) -> tuple[tuple[int, ...], torch.dtype | None, torch.dtype | None]:
    """B,T,H,D[:DTYPE[:GATE DTYPE]] as sizes and types."""
    numbers, *names = text.split(":")
    sizes = numbers.split(",")
    if len(sizes) != 4 or len(names) > 2 or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not B,T,H,D[:DTYPE[:GATE DTYPE]] with four positive numbers")
    dtype, gate_dtype, *_ = [*(parse_dtype(name) for name in names), None, None]
    if gate_dtype not in (None, dtype) and not (gate_dtype == torch.float32 and dtype.itemsize == 2):
        raise argparse.ArgumentTypeError(f"{text!r}: the gate has the type of q, or is float32 beside half precision")
    return tuple(int(size) for size in sizes), dtype, None if gate_dtype == dtype else gate_dtype


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    description, _, method = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats")
    parser.add_argument("--backward", action="store_true", help="forward plus backward, not the forward alone")
    parser.add_argument("--only", metavar="SECTION", choices=SECTIONS, help=f"one of {', '.join(SECTIONS)}, alone")
    parser.add_argument("--grid", action="store_true", help="add the grid of 300 sizes")
    parser.add_argument(
        "--shapes",
        metavar="SHAPE",
        nargs="+",
        type=parse_shape,
        help="B,T,H,D[:DTYPE[:GATE DTYPE]], in place of the training shapes",
    )
    parser.add_argument(
        "--dtype", type=parse_dtype, help="this type for all shapes but the seed's, and for --shapes that name none"
    )
    parser.add_argument("--torch-compile", action="store_true", help="add the loop under torch.compile (minutes)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--no-fla", action="store_true", help="leave flash-linear-attention out")
    # What precompile_fla starts its processes with.
    parser.add_argument("--fla-precompile", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.shapes and options.only not in (None, "throughput"):
        parser.error("--shapes is for the training shapes: --only throughput, or without --only")
    if options.backward and (options.grid or options.only in ("short", "grid")):
        parser.error("--backward has the sections seed and throughput")
    if options.grid and options.only not in (None, "grid"):
        parser.error(f"--grid and --only {options.only} exclude each other")
    if options.shapes:
        default = options.dtype or torch.float32
        options.shapes = [Problem(*sizes, dtype or default, gate) for sizes, dtype, gate in options.shapes]
    if options.json:
        try:
            # Now rather than after minutes of measuring.
            Path(options.json).open("a").close()
        except OSError as error:
            parser.error(f"--json: {error}")
    return options


def gpu_sections(bench: Bench, options: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """The sections in the order in which they run."""
    wanted = {options.only} if options.only else {"seed", "short", "throughput"}
    if options.grid:
        wanted.add("grid")
    yield partial(measure_limits, bench)
    if options.backward:
        problems = options.shapes or in_dtype(training_problems(options.quick), options.dtype)
        problems = problems if "throughput" in wanted else []
        if bench.peers:
            yield partial(precompile_fla, [*([SEED] if "seed" in wanted else []), *problems], backward=True)
        if "seed" in wanted:
            yield partial(measure_training_seed, bench)
        for problem in problems:
            yield partial(measure_training, bench, problem)
        if problems:
            yield partial(measure_training_memory, bench, problems[0] if options.shapes else MEMORY_PROBLEM)
        return
    dtypes = [options.dtype] if options.dtype else [torch.float32, torch.bfloat16]
    short = short_problems(options.quick, dtypes) if "short" in wanted else []
    training = options.shapes or in_dtype(throughput_problems(options.quick), options.dtype)
    training = training if "throughput" in wanted else []
    if "seed" in wanted:
        yield partial(measure_seed, bench)
    if bench.peers and wanted != {"grid"}:
        yield partial(precompile_fla, [*([SEED] if "seed" in wanted else []), *short, *training])
    if bench.peers and "seed" in wanted:
        yield partial(measure_seed_peers, bench)
    if short:
        yield partial(measure_short, bench, short)
    if training:
        yield partial(measure_throughput, bench, training)
    if "grid" in wanted:
        yield partial(measure_grid, bench, grid_problems(options.quick, dtypes))
    if options.torch_compile and "seed" in wanted:
        yield partial(measure_compiled_loop, bench)


def cpu_problems(options: argparse.Namespace) -> list[Problem]:
    """What a CPU is asked for: short, throughput and grid are a GPU's."""
    if options.grid or (options.only not in (None, "seed") and not options.shapes):
        progress("short, throughput and grid are for GPUs and are left out")
    if options.shapes:
        return options.shapes
    if options.only not in (None, "seed"):
        return []
    return in_dtype([SEED] if options.only else CPU_PROBLEMS, options.dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.fla_precompile:
        return precompile_fla_here(options.fla_precompile, options.backward)
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
    elif options.torch_compile and options.backward:
        progress("--torch-compile goes with the forward alone and is left out")
    peers: list[Peer] = []
    fla = "left out"
    if on_gpu and not options.no_fla:
        peers, fla = load_fla()
    report = Report(describe(gated_delta_jit, on_gpu, fla), on_gpu)
    for name, value in report.environment.items():
        report.say(f"{name:16}{value}")
    report.say()

    model = gated_delta_jit.ModelNew()
    status = 0
    device = "cuda" if on_gpu else "cpu"
    try:
        check_results(report, model, device)
        if options.backward and not report.wrong:
            check_gradients(report, gated_delta_jit, device)
        if report.wrong:
            sections: Iterator[Callable[[], None]] = iter(())
        elif on_gpu:
            sections = gpu_sections(Bench(report, gated_delta_jit, model, peers, options.quick), options)
        else:
            problems = cpu_problems(options)
            cpu = partial(measure_cpu, report, gated_delta_jit, problems, options.quick, options.backward)
            sections = iter([cpu] if problems else [])
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
