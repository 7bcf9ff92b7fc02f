#!/usr/bin/env python3
"""Builds and runs the CUDA source on this machine's CPU. See README.md beside this file, or --help."""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PROJECT = os.path.dirname(os.path.dirname(HERE))
BUILD = os.environ.get("EMU_BUILD", os.path.join(HERE, "build"))
SHIM = os.path.join(HERE, "shim")
DUMP_PYTHON = os.environ.get("EMU_PYTHON", sys.executable)  # has torch, which gated_delta_jit.py imports
CUDA = os.environ.get("EMU_CUDA", os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"))
NICE = ["nice", "-n", "10"]
FLAGS = {
    "plain": [],
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1"],
    "race": ["-DEMU_RACE"],
}
# Of the kernels alone. With -fsanitize=thread gcc calls a hook at every access; shim/emu.cpp has the hooks.
KERNEL_FLAGS = {"plain": [], "asan": [], "race": ["-fsanitize=thread", "-DEMU_RACE"]}


def dump(source, script):
    """The CUDA source: a .cu file, or what gated_delta_jit.py --dump writes."""
    if source:
        with open(source) as file:
            return file.read()
    folder = os.path.join(BUILD, "dump")
    os.makedirs(folder, exist_ok=True)
    run = subprocess.run([DUMP_PYTHON, script, "--dump", folder], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(f"--dump failed:\n{run.stdout}{run.stderr}")
    with open(os.path.join(folder, "gated_delta.cu")) as file:
        return file.read()


def blank_comments(text):
    """The text with comments and strings blanked, at unchanged offsets."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def balanced_end(text, start, opening, closing):
    depth = 0
    for i in range(start, len(text)):
        if text[i] in opening:
            depth += 1
        elif text[i] in closing:
            depth -= 1
            if depth == 0:
                return i + 1
    raise ValueError(f"unbalanced {opening} from offset {start}: {text[start : start + 80]!r}")


PTX_BANNER = "// ============================== PTX in small named functions ====="
PTX_HOST = os.path.join(SHIM, "ptx.h")


def device_functions(text):
    return set(re.findall(r"__device__[^;{}()]*?\b(\w+)\s*(?:<[^<>;{}()]*>)?\s*\(", blank_comments(text)))


def ptx_section(text):
    """Offsets of the section with the PTX, from its banner up to the next one; None without one."""
    begin = text.find(PTX_BANNER)
    if begin < 0:
        return None
    end = text.find("\n// =====", begin)
    return begin, len(text) if end < 0 else end + 1


def replace_ptx(text):
    """The section with the PTX becomes an include of its host version."""
    place = ptx_section(text)
    if place is None:
        return text
    section = text[place[0] : place[1]]
    missing = device_functions(section) - device_functions(read(PTX_HOST))
    if missing:
        sys.exit(f"emu: {os.path.relpath(PTX_HOST)} defines no {', '.join(sorted(missing))} of the source's PTX section")
    include = f'{section.splitlines()[0]}\n#include "ptx.h"\n'
    return text[: place[0]] + include + "\n" * (section.count("\n") - 2) + text[place[1] :]


def rewrite(text):
    """CUDA to C++. The number of lines stays, so that messages name lines of gated_delta.cu."""
    text = replace_ptx(text)
    # Here the device changes from case to case; and the race check has no hooks for atomic numbers.
    text = text.replace("device < kMostDevices", "false")
    stub = "struct { uint64_t load(int) { return 0; } void store(uint64_t, int) {} }"
    text = text.replace("static std::atomic<uint64_t> known", f"static {stub} known")
    text = text.replace("std::memory_order_relaxed", "0")
    # Defined for the kernels alone: CUDA's headers would take it for nvcc's device pass.
    text = re.sub(r"\b__CUDA_ARCH__\b", "EMU_ARCH", text)
    text = re.sub(r"\b__CUDA_ARCH_FEAT_SM90_ALL\b", "EMU_ARCH_FEAT_SM90_ALL", text)
    # cudaLaunchKernelEx(&config, kernel, args): launches run one after the other here, whatever their attributes.
    text = text.replace("cudaLaunchConfig_t", "::emu::LaunchConfig")
    text = re.sub(r"\.(grid|block)Dim\b", r".\1", text)
    text = re.sub(
        r"cudaLaunchKernelEx\(&(\w+), (\w+), ([^()]*)\)",
        r"(\2<<<\1.grid, \1.block, \1.dynamicSmemBytes, \1.stream>>>(\3), cudaGetLastError())",
        text,
    )
    # kernel<...><<<config>>>(args), from the last to the first.
    while True:
        clean = blank_comments(text)
        at = clean.rfind("<<<")
        if at < 0:
            break
        end_config = clean.index(">>>", at)
        end = balanced_end(clean, clean.index("(", end_config), "(", ")")
        args = text[clean.index("(", end_config) + 1 : end - 1]
        begin = len(clean[:at].rstrip())
        if clean[begin - 1] == ">":
            depth = 0
            while True:
                begin -= 1
                depth += {">": 1, "<": -1}.get(clean[begin], 0)
                if depth == 0:
                    break
        begin = re.search(r"[\w:]+\s*$", clean[:begin]).start()
        callee = text[begin:at].strip()
        config = text[at + 3 : end_config]
        space = "\n" * text[begin:end].count("\n")
        strip = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
        flat_args, flat_config, flat_callee = (" ".join(strip.sub(" ", x).split()) for x in (args, config, callee))
        name = flat_callee.replace('"', "")
        comma = ", " if flat_args else ""
        call = (
            f'::emu::run(::emu::config({flat_config}), "{name}", ::emu::address({flat_callee}), '
            f"[&](const auto&... emu_args) {{ {flat_callee}(emu_args...); }}{comma}{flat_args}){space}"
        )
        text = text[:begin] + call + text[end:]
    # Shared memory.
    text = re.sub(
        r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([\w:]+(?:\s+[\w:]+)*?)\s+(\w+)\s*\[\s*\]\s*;",
        r"\1* const \2 = reinterpret_cast<\1*>(::emu::dynamic_shared());",
        text,
    )
    count = 0

    def static(match):
        nonlocal count
        count += 1
        kind, name, dims = match.group(1).strip(), match.group(2), match.group(3)
        return (
            f"using emu_shared_{name} = {kind}{dims}; emu_shared_{name}& {name} = "
            f"*static_cast<emu_shared_{name}*>(::emu::static_shared({count}, sizeof(emu_shared_{name})));"
        )

    text = re.sub(
        r"__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([^;=]*?)\s*\b(\w+)\s*((?:\[[^\]]*\]\s*)*);",
        static,
        text,
    )
    return text


def digest(*parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def read(path):
    with open(path) as file:
        return file.read()


def compile_object(name, path_in, includes, flags, quiet):
    """Compiles once per content of the file, its includes and the flags."""
    command = ["g++", "-std=c++17", "-march=native", "-ffp-contract=off", "-isystem", CUDA, "-I", SHIM, *flags]
    command += ["-Wno-unknown-pragmas"]
    key = digest(read(path_in), *(read(f) for f in includes), " ".join(command))
    out = os.path.join(BUILD, f"{name}-{key}.o")
    if os.path.exists(out):
        return out, None
    work = out + f".{os.getpid()}.tmp"
    if not quiet:
        print(f"emu: compiling {name} ({' '.join(flags)})", flush=True)
    process = subprocess.Popen(
        [*NICE, *command, "-c", path_in, "-o", work], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return out, (process, work, out)


def prune():
    """Drops all but the newest results of earlier builds."""
    paths = [
        os.path.join(BUILD, name)
        for name in os.listdir(BUILD)
        if name.startswith(("kernels-", "driver-", "test-", "src-"))
    ]
    for path in sorted(paths, key=os.path.getmtime)[:-80]:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.remove(path)


def finish(jobs, mode, quiet=False):
    """Waits for the compilers and links. The path of the program in a list, or a string of messages."""
    for _, job in jobs:
        if job:
            process, work, out = job
            messages, _ = process.communicate()
            if process.returncode != 0:
                return messages
            if messages.strip() and not quiet:
                print(messages, flush=True)
            os.replace(work, out)
    program = os.path.join(BUILD, "test-" + digest(*(out for out, _ in jobs)))
    if not os.path.exists(program):
        sanitizers = [f for f in FLAGS[mode] if f.startswith("-f")]
        link = ["g++", *sanitizers, *(out for out, _ in jobs), "-o", program, "-lpthread"]
        run = subprocess.run(link, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            return run.stdout + run.stderr
    return [program]


def source_folder(text, mode):
    """A folder for the rewritten source and what is derived from it."""
    os.makedirs(BUILD, exist_ok=True)
    prune()
    folder = os.path.join(BUILD, f"src-{digest(text, mode)}")
    os.makedirs(folder, exist_ok=True)
    return folder


def write(path, text):
    if not os.path.exists(path) or read(path) != text:
        with open(path, "w") as file:
            file.write(text)


def arch_flags(arch):
    flags = [f"-DEMU_ARCH={int(arch.removesuffix('a'))}"]
    return [*flags, "-DEMU_ARCH_FEAT_SM90_ALL"] if arch == "900a" else flags


def keep_dtype(source, dtype):
    """The source with less to compile: the launchers' code for other types goes."""
    names = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16", "float64": "Float64"}
    others = "|".join(name for key, name in names.items() if key != dtype)
    source = re.sub(
        rf"case Dtype::k(?:{others}):\s*\n\s*(?:error = (?:(?!case |break;).)*?break;|return \w+<[^;]*;)",
        "", source, flags=re.S,
    )  # fmt: skip
    source = re.sub(rf"if \(p\.dtype == Dtype::k(?:{others})[^;]*?\) return use\([^;]*;", "", source)
    if dtype == "bfloat16":
        source = source.replace("use(TensorKernels<float, float>())", "use(TensorKernels<__nv_bfloat16, __nv_bfloat16>())")
    return source


def build(source, mode, optimise, dtype, arch, quiet=False):
    """The path of the test program, or a string of compiler messages. A dtype: without the kernels of others."""
    contract = source[: source.index("#include <cuda_bf16.h>")]
    if dtype:
        source = keep_dtype(source, dtype)
    backward = "launch_backward" in source
    converted = '#include <cuda_runtime.h>\n#line 1 "gated_delta.cu"\n' + rewrite(source)
    folder = source_folder(converted, mode)
    write(os.path.join(folder, "gated_delta.emu.cpp"), converted)
    write(os.path.join(folder, "contract.h"), contract)
    headers = [os.path.join(SHIM, "emu.h"), os.path.join(folder, "contract.h")]
    driver = os.path.join(HERE, "driver.cpp")
    call = os.path.join(HERE, "backward_call.h")
    defines = ["-DEMU_BACKWARD"] if backward else []
    defines += ["-DEMU_FORWARD_SCRATCH"] if "forward_scratch_bytes" in contract else []
    jobs = [
        compile_object(
            "kernels",
            os.path.join(folder, "gated_delta.emu.cpp"),
            [*headers[:1], PTX_HOST],
            [optimise, *arch_flags(arch), *FLAGS[mode], *KERNEL_FLAGS[mode]],
            quiet,
        ),
        compile_object("emu", os.path.join(SHIM, "emu.cpp"), headers[:1], ["-O2", *FLAGS[mode]], quiet),
        compile_object("driver", driver, [*headers, call], ["-O2", "-I", folder, *defines, *FLAGS[mode]], quiet),
    ]
    return finish(jobs, mode, quiet)


PTX_TEST = os.path.join(HERE, "ptx_test.cu")


def ptx_test(source):
    """The test of the PTX functions, with the source's section in the place of its own, which is empty."""
    test = read(PTX_TEST)
    begin, end = ptx_section(test)
    place = ptx_section(source)
    return test if place is None else test[:begin] + source[place[0] : place[1]] + test[end:]


def build_ptx(source, mode, optimise, arch):
    converted = '#include <cuda_runtime.h>\n#line 1 "ptx_test.cu"\n' + rewrite(ptx_test(source))
    path = os.path.join(source_folder(converted, mode), "ptx_test.emu.cpp")
    write(path, converted)
    header = os.path.join(SHIM, "emu.h")
    flags = [optimise, *arch_flags(arch), *FLAGS[mode], *KERNEL_FLAGS[mode]]
    jobs = [
        compile_object("kernels", path, [header, PTX_HOST], flags, False),
        compile_object("emu", os.path.join(SHIM, "emu.cpp"), [header], ["-O2", *FLAGS[mode]], False),
    ]
    return finish(jobs, mode)


def execute(program, what, args, jobs, mode, quiet=False):
    """Runs the cases in `jobs` processes. True if all passed."""
    environment = dict(os.environ)
    environment.setdefault("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1")
    environment.setdefault("UBSAN_OPTIONS", "print_stacktrace=1")
    start = time.time()
    running = []
    for shard in range(jobs):
        command = [*NICE, program, what, "--shard", f"{shard}/{jobs}", *args]
        out = open(os.path.join(BUILD, f"out-{os.getpid()}-{shard}.log"), "w+")
        running.append((subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment), out))
    passed = True
    text = ""
    for process, out in running:
        code = process.wait()
        out.seek(0)
        part = out.read()
        text += part
        out.close()
        os.remove(out.name)
        if code != 0:
            passed = False
            text += f"emu: exit status {code}\n"
    if not quiet:
        sys.stdout.write(text)
        print(f"emu: {what} ({mode}): {'PASS' if passed else 'FAIL'} in {time.time() - start:.1f} s", flush=True)
    return passed, text


# Where a mutation is tested: operator, type, architecture, which cases.
FORWARD = ("forward", "float32", "900", [])
BACKWARD = ("backward", "float32", "900", [])
TENSOR = ("forward", "float32", "900", ["--tensor"])
TENSOR_BFLOAT = ("forward", "bfloat16", "900", ["--tensor"])
WGMMA = ("forward", "bfloat16", "900a", ["--tensor"])
PACKED = ("forward", "float32", "900", ["--packed"])
PACKED_BACKWARD = ("backward", "float32", "900", ["--packed"])

# Name, pattern, replacement, the build that has to notice, and where, if not FORWARD. Each must change the source.
MUTATIONS = [
    ("drop the barrier after publishing", r"(\n\s*)__syncthreads\(\);", r"\1;", "plain"),
    ("drop the barrier, race check", r"(\n\s*)__syncthreads\(\);", r"\1;", "race"),
    ("one half of shared memory only", r"\? half : -half", r"? 0 : 0", "plain"),
    ("one half of shared memory only, race check", r"\? half : -half", r"? 0 : 0", "race"),
    (
        "shared memory for one half only",
        r"2 \* warps \* Traits::kStateWords \* Traits",
        r"warps * Traits::kStateWords * Traits",
        "asan",
    ),
    (
        "shared memory for one half only, race check",
        r"2 \* warps \* Traits::kStateWords \* Traits",
        r"warps * Traits::kStateWords * Traits",
        "race",
    ),
    ("flip the sign of k v", r"tile\.k\(c, i\) \* tile\.v\(c, m\)\)", r"-tile.k(c, i) * tile.v(c, m))", "plain"),
    ("fold one warp too few", r"fold\(0, warp\)", r"fold(0, warp - 1)", "plain"),
    ("row bound off by one (reads past the end)", r"row \+ e < rows\)", r"row + e <= rows)", "asan"),
    ("row bound off by one, race build", r"row \+ e < rows\)", r"row + e <= rows)", "race"),
    (
        "shift the gate by one step",
        r"first \+ static_cast<int64_t>\(c\) \* view\.stride\[1\];\n(\s*)if constexpr \(!kWhole",
        r"first + static_cast<int64_t>(c > 0 ? c - 1 : c) * view.stride[1];\n\1if constexpr (!kWhole",
        "plain",
    ),
    (
        "wrong shuffle distance",
        r"stretch\.decay\[m\], distance \* kStateLanes\)",
        r"stretch.decay[m], distance * kStateLanes / 2)",
        "plain",
    ),
    (
        "a shuffle in one branch only",
        r"const Accum earlier = __shfl_up_sync\(~0u, stretch\.decay\[m\], distance \* kStateLanes\);\n(\s*)if \(has_earlier\)",
        r"const Accum earlier = has_earlier ? __shfl_up_sync(~0u, stretch.decay[m], distance * kStateLanes) : Accum(0);\n\1if (has_earlier)",
        "plain",
    ),
    (
        "last output step not written",
        r"if \(c < steps\) \*reinterpret_cast<Pack",
        r"if (c + 1 < steps) *reinterpret_cast<Pack",
        "plain",
    ),
    ("outputs of steps past the end written", r"if \(c >= steps \|\| m", r"if (c > steps || m", "asan"),
    (
        "two blocks of one launch write the same output",
        r"blockIdx\.z\) \* Traits::kTileColumns \+",
        r"(blockIdx.z == 1 ? 0 : blockIdx.z)) * Traits::kTileColumns +",
        "race",
    ),
    ("backward: drop the barriers", r"(\n\s*)__syncthreads\(\);", r"\1;", "plain", BACKWARD),
    ("backward: drop the barriers, race check", r"(\n\s*)__syncthreads\(\);", r"\1;", "race", BACKWARD),
    (
        "backward: shared memory too small",
        r"words \* sizeof\((?:typename Traits::)?Accum\)",
        r"(words - 1) * sizeof(typename Traits::Accum)",
        "asan",
        BACKWARD,
    ),
    (
        "backward: shared memory too small, race build",
        r"words \* sizeof\((?:typename Traits::)?Accum\)",
        r"(words - 1) * sizeof(typename Traits::Accum)",
        "race",
        BACKWARD,
    ),
    (
        "backward: scratch too small",
        r"total = rows\[1\] \+ rows_size;",
        r"total = rows[1] + rows_size - (rows_size + states_size > 0);",
        "asan",
        BACKWARD,
    ),
    (
        "backward: dgate reads the state after the step",
        r"second = multiply_add\(states\[c\]\[a\]",
        r"second = multiply_add(states[c + 1][a]",
        "plain",
        BACKWARD,
    ),
    (
        "backward: flip the sign of dk",
        r"second = multiply_add\(lane\.v\[c\]\[column\], r",
        r"second = multiply_add(-lane.v[c][column], r",
        "plain",
        BACKWARD,
    ),
    (
        "backward: flow skips a gate",
        r"after\[a\]\[b\] = r \* lane\.gate\[c\]\[column\];",
        r"after[a][b] = c == 1 ? r : r * lane.gate[c][column];",
        "plain",
        BACKWARD,
    ),
    (
        "backward: chain reads the next sweep's flow",
        r"flows\[sweep \* elements\] = flow;",
        r"flows[sweep * elements] = start;",
        "plain",
        BACKWARD,
    ),
    (
        "backward: gather misses a chunk",
        r"begin \+ e >= chunks\) break",
        r"begin + e >= chunks - 1) break",
        "plain",
        BACKWARD,
    ),
    (
        "tensor cores: half of a level's mask",
        r"quad\(group / 2 == quad, group / 2 == quad\)",
        r"quad(group / 2 == quad, false)",
        "plain",
        TENSOR,
    ),
    (
        "tensor cores: no barrier after the first products",
        r"(multiply_q_k\(1, next_stage\(0, stage\)\);\n\s*)__syncthreads\(\);",
        r"\1;",
        "race",
        TENSOR,
    ),
    (
        "tensor cores: no barrier in the loop",
        r"__syncthreads\(\);(\n\s*start_loading\(chunk \+ launch)",
        r";\1",
        "race",
        TENSOR,
    ),
    ("tensor cores: no wait for copies", r"wait_for_all_but\(launch\.stages - 4\);", r";", "plain", TENSOR),
    (
        "tensor cores: a chunk's decay is lost",
        r"state\[2 \* kk \+ n / 4\]\[n % 4\] \*= plan\.decay\[n / 2 % 2\];",
        r";",
        "plain",
        TENSOR,
    ),
    (
        "tensor cores: the gate of the first step past the end counts",
        r"(4 \* quad \+ n / 4 \* 2 \+ n % 2) < left",
        r"\1 <= left",
        "plain",
        TENSOR,
    ),
    (
        "tensor cores: join_segments stops one early",
        r"segment \+ n \+ 1 < segments\) state",
        r"segment + n + 2 < segments) state",
        "plain",
        TENSOR,
    ),
    (
        "tensor cores: outputs read without a __syncwarp",
        r"__syncwarp\(\);(\n\s*constexpr int kStepsAtOnce)",
        r";\1",
        "race",
        TENSOR_BFLOAT,
    ),
    (
        "wgmma: another permutation of the chunks",
        r"permuted = chunk \^ \(slot & 7\);",
        r"permuted = chunk ^ (slot >> 1 & 7);",
        "plain",
        WGMMA,
    ),
    (
        "wgmma: wrong panel",
        r"kk / 4 \* Traits::RowTile::kPanelBytes",
        r"kk / 4 * Traits::RowTile::kPanelBytes / 2",
        "plain",
        WGMMA,
    ),
    (
        "wgmma: products stored in the other chunk's place",
        r"\(chunk % 2 \* Traits::kProducts \+ m \* kTiles",
        r"((chunk + 1) % 2 * Traits::kProducts + m * kTiles",
        "plain",
        WGMMA,
    ),
    ("wgmma: outputs not waited for", r"wgmma_wait<2>\(\);", r"wgmma_wait<3>();", "plain", WGMMA),
    ("wgmma: no fence for copies", r"if constexpr \(kWgmma\) fence_for_wgmma\(\);", r"", "race", WGMMA),
    (
        "wgmma: no fence after writing registers",
        r"wgmma_fence\(\);(\n\s*const uint64_t q_now)",
        r";\1",
        "plain",
        WGMMA,
    ),
    (
        "packed: a sequence's start is one step late",
        r"starts >> c & 1 \? 0 : gate\[c\]\[m\]",
        r"c > 0 && (starts >> (c - 1) & 1) ? 0 : gate[c][m]",
        "plain",
        PACKED,
    ),
    (
        "packed: pieces overlap by a step",
        r"piece\.start = max\(begin, line << shift\);",
        r"piece.start = max(begin, (line << shift) - 1);",
        "plain",
        PACKED,
    ),
    (
        "packed: the last step's neighbours aren't cleared",
        r"const int64_t first = min\(max\(\*end, int64_t\{0\}\), steps\);",
        r"const int64_t first = min(max(*end + 1, int64_t{0}), steps);",
        "plain",
        PACKED,
    ),
    (
        "packed: dgate at a start isn't zero",
        r"if \(lane\.starts >> flat / kOwned & 1\) \*total = 0;",
        r"",
        "plain",
        PACKED_BACKWARD,
    ),
    (
        "packed: a sequence's chain begins one slot late",
        r"first = head \* launch\.sweeps \+ first_slot\(",
        r"first = head * launch.sweeps + 1 + first_slot(",
        "plain",
        PACKED_BACKWARD,
    ),
]


def mutate(source, options):
    failures = 0
    done = 0
    for name, pattern, replacement, mode, *place in MUTATIONS:
        operator, dtype, arch, cases = place[0] if place else FORWARD
        if options.only and options.only not in name:
            continue
        mutant, count = re.subn(pattern, replacement, source)
        if count == 0:
            print(f"emu: mutation '{name}': the source has no such text any more", flush=True)
            failures += 1
            done += 1
            continue
        start = time.time()
        built = build(mutant, mode, "-O1", dtype, arch, quiet=True)
        if isinstance(built, str):
            print(f"emu: mutation '{name}': does not compile\n{built[-800:]}")
            failures += 1
            done += 1
            continue
        compiled = time.time() - start
        arguments = ["--quick", "--dtype", dtype, *cases, *options.rest]
        passed, text = execute(built[0], operator, arguments, options.jobs, mode, quiet=True)
        lines = text.splitlines()
        found = next(
            (n for n, line in enumerate(lines) if "FAIL" in line or "ERROR" in line or "runtime error" in line), None
        )
        first = "" if found is None else " ".join(line.strip() for line in lines[found : found + 2])
        failed = re.findall(r"(\d+) of (\d+) cases failed", text)
        note = " + ".join(f"{a}/{b}" for a, b in failed)
        verdict = "SURVIVED" if passed else "caught"
        print(
            f"emu: mutation '{name}' [{mode}]: {verdict} (cases failed {note}; built in {compiled:.0f} s, ran "
            f"{time.time() - start - compiled:.0f} s)\n       {first.strip()[:420]}",
            flush=True,
        )
        failures += passed
        done += 1
    print(f"emu: {done - failures} of {done} mutations caught", flush=True)
    return failures == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other options go to the test program: see README.md.")
    parser.add_argument("what", choices=["forward", "backward", "step", "selftest", "ptx", "mutate", "build", "rewrite"])
    parser.add_argument("--source", help="a .cu file instead of gated_delta_jit.py --dump")
    parser.add_argument("--script", default=os.path.join(PROJECT, "gated_delta_jit.py"))
    parser.add_argument("--append", action="append", default=[], help="a .cu file to append to the source")
    parser.add_argument("--mode", default="plain", help="plain, asan, race, or several with commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--float", action="store_true", help="compile float32 kernels only (with --dtype float32)")
    parser.add_argument("-O", default="1", help="optimisation of the kernels (default 1)")
    parser.add_argument("--arch", default="900", help="__CUDA_ARCH__ (default 900), or 900a")
    parser.add_argument("--print", action="store_true", help="ptx: print the test as a program for nvcc")
    parser.add_argument("--only", help="mutate: those with this text in their name")
    options, options.rest = parser.parse_known_args()
    source = dump(options.source, options.script)
    for path in options.append:
        source += "\n" + read(path)
    if options.what == "rewrite":
        sys.stdout.write(rewrite(source))
        return 0
    if options.what == "ptx" and options.print:
        sys.stdout.write(ptx_test(source))
        return 0
    if options.what == "mutate":
        return 0 if mutate(source, options) else 1
    good = True
    for mode in options.mode.split(","):
        start = time.time()
        if options.what == "ptx":
            built = build_ptx(source, mode, f"-O{options.O}", options.arch)
        else:
            built = build(source, mode, f"-O{options.O}", "float32" if options.float else None, options.arch)
        if isinstance(built, str):
            print(built)
            print(f"emu: {mode} does not compile")
            return 1
        print(f"emu: {mode} built in {time.time() - start:.1f} s: {built[0]}", flush=True)
        if options.what != "build":
            extra = ["--dtype", "float32"] if options.float else []
            jobs = 1 if options.what == "ptx" else options.jobs
            passed, _ = execute(built[0], options.what, [*extra, *options.rest], jobs, mode)
            good = good and passed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
