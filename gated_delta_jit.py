# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the gated_delta_jit authors
"""Value-gated linear recurrence: gated linear attention with a decay for every value channel.

For every batch b and head h a state S of shape (K, V) walks over time:

    S_t[i, j] = gate_t[j] * S_{t-1}[i, j] + k_t[i] * v_t[j]
    y_t[j]    = scale * sum_i q_t[i] * S_t[i, j]                   (y_t reads the state after step t's update)

    from gated_delta_jit import ModelNew, gated_delta
    y = ModelNew()(q, k, v, gate)                            # zero state, scale 1: the drop-in for the PyTorch loop
    y, S = gated_delta(q, k, v, gate, initial_state=S0, output_final_state=True)
    y = gated_delta_step(q, k, v, gate, S)                   # one step of time, decoding: S changes in place

q, k: (B, T, H, K), or fewer heads, each shared by a group; v: (B, T, H, V); gate: broadcastable to (B, T, H, V);
y: (B, T, H, V); S: (B, H, K, V). Only products of gates are formed, never a quotient or a logarithm, so gates that are
0, tiny, negative or above 1 are exact.

This file is all there is: it holds CUDA and C++ as text, compiles them on first import and loads them from a cache
later. Read it from top to bottom:

    SHARED_SOURCE   the structures that host and device exchange
    CUDA_SOURCE     kernels and their launch, free of torch, so that plain nvcc compiles what `--dump DIR` writes:
                    mathematics and words, small helpers, packed sequences, SIMT forward (small problems, any size and
                    type), PTX in small named functions, tensor-core forward (large problems; dyadic gating, segments),
                    SIMT backward, tensor-core backward, decode step, launching (the rules that choose, the ways in)
    CPP_SOURCE      CPU kernel; the torch side: arguments, operator, autograd, registration; the short way from Python
    Python          building and loading; the operator: `gated_delta`, `gated_delta_step`, `ModelNew`
"""

import contextlib
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time

import torch

__all__ = ["ModelNew", "gated_delta", "gated_delta_step"]
__version__ = "0.1.0"

SHARED_SOURCE = r"""// ============================ The contract between host and device ============================

#include <cstdint>

namespace gated_delta {

enum class Dtype : int { kFloat32, kFloat64, kFloat16, kBFloat16 };

// A strided operand. Strides are in elements; the axes are (batch, time, head, channel) for q, k,
// v, gate and y, and (batch, head, row, column) for states.
template <typename Index>
struct View {
  void* data = nullptr;
  Index stride[4] = {0, 0, 0, 0};
};

// One forward call. Letters as everywhere: B, T, H, K, V. Kernels that fit take 32-bit indices:
// their parameters fill fewer lines of the constant cache, and an address costs one multiply-add.
template <typename Index>
struct Arguments {
  View<Index> q, k, v, gate, y;
  Index B = 0, T = 0, H = 0, K = 0, V = 0;
  Index group = 1;                     // heads that share one head of q and k, one after the other
  Dtype dtype = Dtype::kFloat32;       // of q, k, v, y
  Dtype gate_dtype = Dtype::kFloat32;  // dtype, or float32 beside half-precision q, k, v
  bool log_gate = false;
  double scale = 1.0;
  View<Index> initial_state;  // data is null for a zero state
  View<Index> final_state;    // data is null when it isn't asked for
  void* scratch = nullptr;    // forward_scratch_bytes(p) of it
  View<Index> partial;        // (B, T, H, V) sums in the state's type, see forward_needs_partial
  void* states = nullptr;     // states that a forward leaves for its backward, see kept_state_bytes

  // Packed sequences, B = 1, in one of two forms. With `borders` sequence n has the steps from
  // borders[n] to borders[n + 1] and the n-th initial and final state. With `starts`, where nobody
  // asks for states, time is one row: the gate of a step whose bit is set (step t: bit t % 32 of
  // word t / 32) counts as 0. In both, steps from *end on are nobody's.
  Index sequences = 0;
  const int64_t* borders = nullptr;
  const uint32_t* starts = nullptr;
  const int64_t* end = nullptr;
};
using Params = Arguments<int64_t>;

// What a backward call has besides: gradients that come in, and where those that go out are wanted.
// Data is null for an incoming gradient of zero and for an outgoing one that nobody needs.
struct Gradients {
  View<int64_t> dy;
  View<int64_t> dfinal_state;
  View<int64_t> dq, dk, dv;  // q's dtype; dq and dk of each of H heads, not yet summed over groups
  View<int64_t> dgate;  // (B, T, H, V), see gate_gradient_dtype; not yet summed over broadcast axes
  View<int64_t> dinitial_state;  // the state's type
};

// One decode step: the operands are those of one step of time, axis 1 is unused; y is (B, H, V).
struct StepParams {
  View<int64_t> q, k, v, gate, y;
  View<int64_t> state;  // (pool, H, K, V), read and written
  int64_t B = 0, H = 0, K = 0, V = 0;
  int64_t group = 1;  // heads that share one head of q and k
  int64_t pool = 0;
  Dtype dtype = Dtype::kFloat32;        // of q, k, v, y
  Dtype gate_dtype = Dtype::kFloat32;   // dtype, or float32 beside half-precision q, k, v
  Dtype state_dtype = Dtype::kFloat32;  // float32 (float64 beside float64), or dtype
  bool log_gate = false;
  bool long_indices = false;  // int64, not int32
  double scale = 1.0;
  const void* indices = nullptr;  // null: batch b has the pool's row b
  int64_t index_stride = 0;
};

// Kernels that calls take: by a rule, or, for tests, SIMT ones alone or tensor cores wherever
// they can.
enum class Kernels : int { kByRule, kSimt, kTensorCores };
extern Kernels chosen_kernels;

// Rows of the state (in the backward: elements of the axis that is summed) that one kernel launch
// handles. Larger ones are cut in slices whose outputs add up.
constexpr int64_t max_rows(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 64 : 128;
}

}  // namespace gated_delta
"""

CUDA_SOURCE = SHARED_SOURCE + r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

// Not every architecture, nor every part of this source, calls every function.
#pragma nv_diag_suppress 177

namespace gated_delta {
namespace {

// ================================== Mathematics and words =====================================
//
// Columns of a state never mix. What a stretch of time does to column j of the state before it is
//
//   S_end[:, j] = G[j] * S_before[:, j] + sum_s k_s * (v_s[j] * gates s+1 .. end)
//
// G, the product of the stretch's gates, is its decay; the gates after v_s "carry" it to the end. A
// stretch is (G, end state from a zero start), and (G2, S2) after (G1, S1) is (G2 G1, G2 S1 + S2).
// That is how time is cut in parts that run side by side: each makes this of its steps, the results
// are chained, and each part runs again from the state that precedes it.
//
// Backward, R_t = dL/dS_t is all that flows back into the state after step t, and the flow F_t its
// share from later steps. F mirrors S: q_t takes the place of k_t, dy_t that of v_t.
//
//   R_t  = scale * q_t dy_t^T + F_t    F_t  = R_{t+1} diag(gate_{t+1})    F_T = dfinal_state
//   dq_t = scale * S_t dy_t            dk_t = R_t v_t                     dv_t = R_t^T k_t
//   dgate_t[j] = sum_i S_{t-1}[i, j] R_t[i, j]                            dinitial_state = F_0
//
// So dy_t is carried back by the gates up to t, its own included. Nothing divides by a gate. A step
// that doesn't exist has gate 1, all else 0; the first step of a packed sequence has gate 0.
//
// Words: rows i < K and columns j < V are those of a state. P is q k^T, times scale. A checkpoint
// is a state or flow kept at every 64th step for the backward. A sweep is the steps that a SIMT
// block has in registers at once. On tensor cores a segment of time has a block of its own; a chunk
// is the steps of one turn of its loop (chunks of 16 bytes are another thing), and a tile 16 of
// them. group and quad are lane / 4 and lane % 4, by which tensor cores deal out elements; a slot
// is one of 16 steps in the tensor core's order (or the number of a sequence's piece). `pair`, as
// an index: of batch and head.

// ======================================= Small helpers ========================================

__device__ __forceinline__ float to_accum(float x) {
  return x;
}
__device__ __forceinline__ double to_accum(double x) {
  return x;
}
__device__ __forceinline__ float to_accum(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_accum(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename Element>
__device__ __forceinline__ Element from_accum(float x);
template <>
__device__ __forceinline__ float from_accum<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_accum<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_accum<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <typename Element>
__device__ __forceinline__ Element from_accum(double x) {
  return x;
}

__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}
__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}

// kCount neighbours in memory that travel in one load or store.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T at[kCount];
};

__host__ __device__ constexpr int largest_pack(int count, int bytes_each) {
  int pack = 1;
  while (count % (2 * pack) == 0 && 2 * pack * bytes_each <= 16) pack *= 2;
  return pack;
}

// Address of element (a, b, c, d) of an operand.
template <typename T, typename Index>
__device__ __forceinline__ T* element_of(const View<Index>& view, std::common_type_t<Index> a,
                                         std::common_type_t<Index> b, std::common_type_t<Index> c,
                                         std::common_type_t<Index> d) {
  const int64_t offset =
      static_cast<int64_t>(a) * view.stride[0] + static_cast<int64_t>(b) * view.stride[1] +
      static_cast<int64_t>(c) * view.stride[2] + static_cast<int64_t>(d) * view.stride[3];
  return static_cast<T*>(view.data) + offset;
}

// Where a (batch, head)'s steps begin: the same for a block's lanes, so one of them multiplies.
template <typename T>
__device__ __forceinline__ T* steps_of(const View<int64_t>& view, uint32_t batch, uint32_t start,
                                       uint32_t head) {
  return static_cast<T*>(view.data) +
         (batch * view.stride[0] + start * view.stride[1] + head * view.stride[2]);
}

// ===================================== Packed sequences =======================================
//
// Arguments has described their two forms. With `borders` long sequences are cut in pieces, a block
// each.

// Part of a packed sequence: where a grid in time with a line every 2^shift steps cuts it.
struct Piece {
  int64_t sequence;
  int64_t start;
  int64_t steps;
  bool exists;
  bool first;  // of its sequence
  bool last;
};

// The piece in a slot. That of sequence n between lines c and c + 1 has slot n + c, so no two share
// one; there are at most sequences + T / 2^shift slots, and some remain empty. Borders that don't
// rise give pieces that make no sense, but lie within [0, T].
__device__ __forceinline__ Piece piece_of(const int64_t* borders, int64_t sequences, int shift,
                                          int64_t slot) {
  int64_t low = 0;
  int64_t high = sequences - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (middle + (borders[middle] >> shift) <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t begin = borders[low];
  const int64_t end = max(begin, borders[low + 1]);
  const int64_t line = slot - low;
  Piece piece;
  piece.sequence = low;
  piece.first = line == begin >> shift;
  piece.last = end <= (line + 1) << shift;
  piece.start = max(begin, line << shift);
  piece.steps = max(min(end, (line + 1) << shift) - piece.start, int64_t{0});
  piece.exists = piece.first || piece.steps > 0;
  return piece;
}

// The sequence's first slot, and how many it has.
__device__ __forceinline__ int64_t first_slot(const int64_t* borders, int shift, int64_t sequence) {
  return sequence + (borders[sequence] >> shift);
}
__device__ __forceinline__ int64_t slots_of(const int64_t* borders, int shift, int64_t sequence) {
  const int64_t begin = borders[sequence];
  const int64_t end = borders[sequence + 1];
  return end > begin ? ((end - 1) >> shift) - (begin >> shift) + 1 : 1;
}

// Bits of `starts` from step t on, which is bit 0, up to the end of t's word.
template <typename Index>
__device__ __forceinline__ uint32_t starts_from(const uint32_t* starts, Index t) {
  return starts[t / 32] >> (t % 32);
}

// From the caller's offsets, whatever they hold: borders within [0, T], the first 0, and bits of
// `starts` if it isn't null, with one at the last border too.
__global__ void mark_sequences(const void* offsets, int64_t stride, bool is_long, int64_t sequences,
                               int64_t steps, int64_t* borders, uint32_t* starts) {
  const auto offset = [&](int64_t n) -> int64_t {
    if (is_long) return static_cast<const int64_t*>(offsets)[n * stride];
    return static_cast<const int32_t*>(offsets)[n * stride];
  };
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = thread; n <= sequences; n += threads)
    borders[n] = n == 0 ? 0 : min(max(offset(n), int64_t{0}), steps);
  if (starts == nullptr) return;
  for (int64_t t = thread; t < (steps + 31) / 32 * 32; t += threads) {
    int64_t low = 0;  // of the first offset that isn't below t
    int64_t high = sequences + 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (offset(middle) < t) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const bool starts_here = t == 0 || (low <= sequences && offset(low) == t);
    const uint32_t word = __ballot_sync(~0u, starts_here);
    if (t % 32 == 0) starts[t / 32] = word;
  }
}

// An output (T, heads, channels) whose steps after the last sequence have to be zero.
struct Tail {
  char* data = nullptr;
  int64_t stride[3] = {0, 0, 0};  // in bytes
  int64_t heads = 0;
  int64_t channels = 0;
  int element = 0;
};
struct Tails {
  Tail at[4];
};

__global__ void clear_tails(const __grid_constant__ Tails tails, int64_t steps,
                            const int64_t* end) {
  const int64_t first = min(max(*end, int64_t{0}), steps);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (const Tail& tail : tails.at) {
    const int64_t row = tail.heads * tail.channels;
    for (int64_t n = thread; n < (steps - first) * row; n += threads) {
      char* const to = tail.data + (first + n / row) * tail.stride[0] +
                       n % row / tail.channels * tail.stride[1] +
                       n % tail.channels * tail.stride[2];
      for (int byte = 0; byte < tail.element; byte += 2)
        *reinterpret_cast<uint16_t*>(to + byte) = 0;
    }
  }
}

// ====================================== SIMT forward ==========================================
//
// Takes every size, dtype and stride; the fast one where time is short or heads are few.
//
// A lane owns kRows rows x kColumns columns of a state and kSteps consecutive steps of time. The 32
// lanes of a warp are kRowGroups (fastest) x kColumnGroups x kTimeGroups; the warps of a block lie
// along time. So one sweep of a block covers warps * kTimeGroups * kSteps steps of one (batch,
// head) and kColumnGroups * kColumns of its columns:
//
//   A  load: each lane its own rows of k and q, its own columns of v and gate, to registers
//   B  stretch: end state of the lane's steps from a zero start, and their product of gates
//   C  scan: (gates, state) pairs compose as (g2, S2) o (g1, S1) = (g2 g1, g2 S1 + S2); first over
//      the warp's time groups by shuffles, then over warps in shared memory behind one barrier
//   D  replay: the recurrence itself from the right state, dotted with q
//   E  output: sum over row groups, scale, store
//
// With one warp and one time group a sweep starts where the last one ended and B and C fall away.

template <typename Element_, typename Accum_, int kRowGroups_, int kRows_, int kTimeGroups_,
          int kColumns_, int kSteps_, int kMaxWarps_, bool kPacked_>
struct SimtTraits {
  using Element = Element_;
  using Accum = Accum_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kRows = kRows_;
  static constexpr int kTimeGroups = kTimeGroups_;
  static constexpr int kColumnGroups = 32 / (kRowGroups * kTimeGroups);
  static constexpr int kColumns = kColumns_;
  static constexpr int kSteps = kSteps_;
  static constexpr int kMaxWarps = kMaxWarps_;
  // Packed: K is a multiple of a row pack, V of a tile's columns, every operand moves in packs,
  // indices fit 32 bits.
  static constexpr bool kPacked = kPacked_;
  using Index = std::conditional_t<kPacked, int32_t, int64_t>;
  static constexpr int kTileColumns = kColumnGroups * kColumns;
  static constexpr int kRowPack = largest_pack(kRows, sizeof(Element));
  static constexpr int kColumnPack = largest_pack(kColumns, sizeof(Accum) > 4 ? 8 : 4);
  static constexpr int kStateWords =
      kRows * kColumns + kColumns;  // a lane's stretch: its state and decay
  static constexpr int kStatePack = largest_pack(kStateWords, sizeof(Accum));
  static constexpr int kStateLanes = kRowGroups * kColumnGroups;
  // Outputs of a lane per sweep once they are summed; kSharers lanes end with the same ones.
  static constexpr int kValues = kSteps * kColumns;
  static constexpr int kOutputs = kValues > kRowGroups ? kValues / kRowGroups : 1;
  static constexpr int kSharers = kRowGroups * kOutputs / kValues;
  static constexpr int kOutputPack = kOutputs < kColumns ? kOutputs : kColumns;
  static_assert(kRowGroups * kTimeGroups * kColumnGroups == 32, "lanes fill a warp");
  static_assert(kColumnPack == kColumns, "a lane's columns travel in one load");
};

// K beyond max_rows is cut in slices, a launch each; their outputs add up.
struct Slice {
  bool accumulate = false;  // add to p.partial what earlier slices left there
  bool last = true;         // write y, else p.partial
};

// Row i of a lane. Packs of neighbouring rows are dealt to the row groups in turn, so that a warp's
// loads are coalesced.
template <class Traits>
__device__ __forceinline__ int row_of(int row_group, int i) {
  return (i / Traits::kRowPack * Traits::kRowGroups + row_group) * Traits::kRowPack +
         i % Traits::kRowPack;
}

// Everything that a lane reads for one sweep.
template <class Traits>
struct SimtTile {
  using Element = typename Traits::Element;
  using Accum = typename Traits::Accum;
  using Index = typename Traits::Index;
  using RowPack = Pack<Element, Traits::kRowPack>;
  static constexpr int kSteps = Traits::kSteps;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kColumns = Traits::kColumns;
  static constexpr int kRowPack = Traits::kRowPack;

  RowPack k_packs[kSteps][kRows / kRowPack];
  RowPack q_packs[kSteps][kRows / kRowPack];
  Pack<Element, kColumns> values[kSteps];
  Accum gate[kSteps][kColumns];

  __device__ __forceinline__ Accum k(int c, int i) const {
    return to_accum(k_packs[c][i / kRowPack].at[i % kRowPack]);
  }
  __device__ __forceinline__ Accum q(int c, int i) const {
    return to_accum(q_packs[c][i / kRowPack].at[i % kRowPack]);
  }
  __device__ __forceinline__ Accum v(int c, int m) const { return to_accum(values[c].at[m]); }

  // Stage A. What lies outside the problem reads as zero, and the gate of steps past the end as
  // one, so that they leave a state as it is. kWhole: all kSteps steps exist.
  template <bool kWhole>
  __device__ __forceinline__ void load(const Arguments<Index>& p, Index batch, Index head,
                                       Index start, Index column, int row_group, int steps,
                                       int columns) {
    const int rows = static_cast<int>(p.K);
    const Index zero = 0;
    const Index row_head = p.group == 1 ? head : head / p.group;
    load_rows<kWhole>(k_packs, element_of<const Element>(p.k, batch, start, row_head, zero), p.k,
                      row_group, steps, rows);
    load_columns<kWhole>(values, element_of<const Element>(p.v, batch, start, head, column), p.v,
                         steps, columns);
    if (sizeof(Element) >= 4 || p.gate_dtype == p.dtype) {
      load_gate<kWhole>(element_of<const Element>(p.gate, batch, start, head, column), p.gate,
                        steps, columns);
    } else {
      load_gate<kWhole>(element_of<const float>(p.gate, batch, start, head, column), p.gate, steps,
                        columns);
    }
    load_rows<kWhole>(q_packs, element_of<const Element>(p.q, batch, start, row_head, zero), p.q,
                      row_group, steps, rows);
  }

  template <bool kWhole>
  static __device__ __forceinline__ void load_rows(RowPack (&packs)[kSteps][kRows / kRowPack],
                                                   const Element* first, const View<Index>& view,
                                                   int row_group, int steps, int rows) {
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      const Element* step = first + static_cast<int64_t>(c) * view.stride[1];
#pragma unroll
      for (int j = 0; j < kRows / kRowPack; ++j) {
        const int row = row_of<Traits>(row_group, j * kRowPack);
        packs[c][j] = RowPack{};
        if constexpr (Traits::kPacked) {
          if ((kWhole || c < steps) && row < rows)
            packs[c][j] = *reinterpret_cast<const RowPack*>(step + row);
        } else {
#pragma unroll
          for (int e = 0; e < kRowPack; ++e) {
            if (c < steps && row + e < rows) packs[c][j].at[e] = step[(row + e) * view.stride[3]];
          }
        }
      }
    }
  }

  template <bool kWhole, typename Source>
  static __device__ __forceinline__ void load_columns(Pack<Source, kColumns> (&packs)[kSteps],
                                                      const Source* first, const View<Index>& view,
                                                      int steps, int columns) {
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      const Source* step = first + static_cast<int64_t>(c) * view.stride[1];
      if constexpr (!kWhole || !Traits::kPacked) packs[c] = Pack<Source, kColumns>{};
      if constexpr (Traits::kPacked) {
        if (kWhole || c < steps) packs[c] = *reinterpret_cast<const Pack<Source, kColumns>*>(step);
      } else {
#pragma unroll
        for (int m = 0; m < kColumns; ++m) {
          if (c < steps && m < columns) packs[c].at[m] = step[m * view.stride[3]];
        }
      }
    }
  }

  template <bool kWhole, typename Source>
  __device__ __forceinline__ void load_gate(const Source* first, const View<Index>& view, int steps,
                                            int columns) {
    Pack<Source, kColumns> packs[kSteps];
    load_columns<kWhole>(packs, first, view, steps, columns);
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
#pragma unroll
      for (int m = 0; m < kColumns; ++m) gate[c][m] = to_accum(packs[c].at[m]);
    }
  }

  // Gates become plain numbers; those of steps past the end become one, those of sequences' first
  // steps zero.
  __device__ __forceinline__ void finish_gate(bool log_gate, int steps, uint32_t starts) {
    if (log_gate) {
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
#pragma unroll
        for (int m = 0; m < kColumns; ++m) gate[c][m] = exponential(gate[c][m]);
      }
    }
    if (steps < kSteps) {
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
#pragma unroll
        for (int m = 0; m < kColumns; ++m) gate[c][m] = c < steps ? gate[c][m] : 1;
      }
    }
    if (starts != 0) {
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
#pragma unroll
        for (int m = 0; m < kColumns; ++m) gate[c][m] = starts >> c & 1 ? 0 : gate[c][m];
      }
    }
  }
};

// What a stretch of time does to a lane's part of a state: S -> decay * S + state.
template <class Traits>
struct Stretch {
  using Accum = typename Traits::Accum;
  Accum decay[Traits::kColumns];
  Accum state[Traits::kRows][Traits::kColumns];

  // This stretch after an earlier state.
  __device__ __forceinline__ void apply_to(
      const Accum (&earlier)[Traits::kRows][Traits::kColumns]) {
#pragma unroll
    for (int i = 0; i < Traits::kRows; ++i) {
#pragma unroll
      for (int m = 0; m < Traits::kColumns; ++m)
        state[i][m] = multiply_add(decay[m], earlier[i][m], state[i][m]);
    }
  }
};

// Sums each of kHeld values over n = 2 * kMask lanes. An exchange halves what a lane still holds,
// so that lane r ends with the kHeld / n sums from number r * kHeld / n on, at the front of y. If
// there are more lanes than values, neighbours end with the same one.
template <int kHeld, int kMask, typename Accum>
__device__ __forceinline__ void reduce_rows(Accum* y, int row_group) {
  if constexpr (kMask > 0) {
    constexpr int kHalf = kHeld / 2;
    if constexpr (kHalf == 0) {
      y[0] += __shfl_xor_sync(~0u, y[0], kMask);
    }
    const bool upper = row_group & kMask;
#pragma unroll
    for (int n = 0; n < kHalf; ++n) {
      const Accum low = y[n];
      const Accum high = y[n + kHalf];
      const Accum received = __shfl_xor_sync(~0u, upper ? low : high, kMask);
      y[n] = (upper ? high : low) + received;
    }
    reduce_rows<(kHalf > 0 ? kHalf : 1), kMask / 2>(y, row_group);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kMaxWarps * 32)
    simt_forward(const __grid_constant__ Arguments<typename Traits::Index> p,
                 const __grid_constant__ Slice slice) {
  using Element = typename Traits::Element;
  using Accum = typename Traits::Accum;
  using Index = typename Traits::Index;
  using StatePack = Pack<Accum, Traits::kStatePack>;
  constexpr int kRows = Traits::kRows;
  constexpr int kColumns = Traits::kColumns;
  constexpr int kSteps = Traits::kSteps;
  constexpr int kStateLanes = Traits::kStateLanes;
  constexpr int kStatePacks = Traits::kStateWords / Traits::kStatePack;
  extern __shared__ __align__(16) unsigned char shared_memory[];

  // ---- Who owns what.
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int row_group = lane % Traits::kRowGroups;
  const int column_group = lane / Traits::kRowGroups % Traits::kColumnGroups;
  const int time_group = lane / kStateLanes;
  const int state_lane = lane % kStateLanes;
  const Index head = blockIdx.x;
  const Index batch = blockIdx.y;
  const Index column =
      static_cast<Index>(blockIdx.z) * Traits::kTileColumns + column_group * kColumns;
  const int columns = Traits::kPacked
                          ? kColumns
                          : static_cast<int>(min(max(p.V - column, Index{0}), Index{kColumns}));
  const bool time_parallel = Traits::kTimeGroups > 1 || warps > 1;
  const int sweep_steps = warps * Traits::kTimeGroups * kSteps;
  const auto owns = [&](int i, int m) { return row_of<Traits>(row_group, i) < p.K && m < columns; };

  // ---- The state before the sweep.
  Accum carry[kRows][kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int m = 0; m < kColumns; ++m) carry[i][m] = 0;
  }

  // Of packed sequences each is a batch of its own.
  Index first = 0;
  Index end = p.T;
  if (p.borders != nullptr) {
    first = static_cast<Index>(p.borders[batch]);
    end = static_cast<Index>(p.borders[batch + 1]);
  } else if (p.end != nullptr) {
    end = static_cast<Index>(*p.end);
  }

  Stretch<Traits> stretch;
  StatePack* published = reinterpret_cast<StatePack*>(shared_memory);
  bool fresh = true;  // no step was made yet
  for (Index sweep_start = first; sweep_start < end; sweep_start += sweep_steps) {
    // ---- A: load.
    SimtTile<Traits> tile;
    const Index start = sweep_start + (warp * Traits::kTimeGroups + time_group) * kSteps;
    const int steps = static_cast<int>(min(max(end - start, Index{0}), Index{kSteps}));
    if (Traits::kPacked && steps == kSteps) {
      tile.template load<true>(p, batch, head, start, column, row_group, steps, columns);
    } else {
      tile.template load<false>(p, batch, head, start, column, row_group, steps, columns);
    }
    if (fresh && p.initial_state.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const Index row = row_of<Traits>(row_group, i);
#pragma unroll
        for (int m = 0; m < kColumns; ++m) {
          if (owns(i, m))
            carry[i][m] =
                *element_of<const Accum>(p.initial_state, batch, head, row, Index(column + m));
        }
      }
    }
    fresh = false;
    const bool marked = p.starts != nullptr && steps > 0;
    tile.finish_gate(p.log_gate, steps, marked ? starts_from(p.starts, start) : 0);

    if (time_parallel) {
      // ---- B: the lane's own stretch. A value enters at step c and decays through the later ones.
#pragma unroll
      for (int m = 0; m < kColumns; ++m) {
        stretch.decay[m] = 1;
#pragma unroll
        for (int i = 0; i < kRows; ++i) stretch.state[i][m] = 0;
#pragma unroll
        for (int c = kSteps - 1; c >= 0; --c) {
          const Accum value = tile.v(c, m) * stretch.decay[m];
          stretch.decay[m] *= tile.gate[c][m];
#pragma unroll
          for (int i = 0; i < kRows; ++i)
            stretch.state[i][m] = multiply_add(tile.k(c, i), value, stretch.state[i][m]);
        }
      }

      // ---- C: scan over the warp's time groups, after which a lane's stretch reaches from the
      // warp's first step to its own last.
#pragma unroll
      for (int distance = 1; distance < Traits::kTimeGroups; distance *= 2) {
        const bool has_earlier = time_group >= distance;
#pragma unroll
        for (int m = 0; m < kColumns; ++m) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const Accum earlier = __shfl_up_sync(~0u, stretch.state[i][m], distance * kStateLanes);
            if (has_earlier)
              stretch.state[i][m] = multiply_add(stretch.decay[m], earlier, stretch.state[i][m]);
          }
          const Accum earlier = __shfl_up_sync(~0u, stretch.decay[m], distance * kStateLanes);
          if (has_earlier) stretch.decay[m] *= earlier;
        }
      }

      // The warp's last group publishes the warp's stretch: decays, then the state row by row.
      if (time_group == Traits::kTimeGroups - 1) {
#pragma unroll
        for (int n = 0; n < kStatePacks; ++n) {
          StatePack words;
#pragma unroll
          for (int e = 0; e < Traits::kStatePack; ++e) {
            const int word = n * Traits::kStatePack + e;
            words.at[e] =
                word < kColumns
                    ? stretch.decay[word % kColumns]
                    : stretch.state[(word / kColumns + kRows - 1) % kRows][word % kColumns];
          }
          published[(warp * kStatePacks + n) * kStateLanes + state_lane] = words;
        }
      }
      // From the warp's first step to just before the lane's own: the scan, one group down.
#pragma unroll
      for (int m = 0; m < kColumns; ++m) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const Accum earlier = Traits::kTimeGroups == 1
                                    ? 0
                                    : __shfl_up_sync(~0u, stretch.state[i][m], kStateLanes % 32);
          stretch.state[i][m] = time_group == 0 ? 0 : earlier;
        }
        const Accum earlier =
            Traits::kTimeGroups == 1 ? 1 : __shfl_up_sync(~0u, stretch.decay[m], kStateLanes % 32);
        stretch.decay[m] = time_group == 0 ? 1 : earlier;
      }
      __syncthreads();

      // Fold the warps before this one into the carry: the state before the warp. If another sweep
      // follows, the others too: the state before that sweep, which publishes in the other half of
      // shared memory. So one barrier a sweep is enough.
      const auto fold = [&](int begin, int end) {
#pragma unroll 1
        for (int w = begin; w < end; ++w) {
          Accum words[Traits::kStateWords];
#pragma unroll
          for (int n = 0; n < kStatePacks; ++n) {
            const StatePack pack = published[(w * kStatePacks + n) * kStateLanes + state_lane];
#pragma unroll
            for (int e = 0; e < Traits::kStatePack; ++e)
              words[n * Traits::kStatePack + e] = pack.at[e];
          }
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int m = 0; m < kColumns; ++m) {
              carry[i][m] = multiply_add(words[m], carry[i][m], words[(i + 1) * kColumns + m]);
            }
          }
        }
      };
      fold(0, warp);
      stretch.apply_to(carry);
      if (sweep_start + sweep_steps < end) fold(warp, warps);
      const int half = warps * kStatePacks * kStateLanes;
      published += published == reinterpret_cast<StatePack*>(shared_memory) ? half : -half;
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int m = 0; m < kColumns; ++m) stretch.state[i][m] = carry[i][m];
      }
    }

    // ---- D: the recurrence, from the state before the lane's first step.
    Accum y[kSteps * kColumns];
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
#pragma unroll
      for (int m = 0; m < kColumns; ++m) {
        Accum sum = 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          stretch.state[i][m] =
              multiply_add(tile.gate[c][m], stretch.state[i][m], tile.k(c, i) * tile.v(c, m));
          sum = multiply_add(tile.q(c, i), stretch.state[i][m], sum);
        }
        y[c * kColumns + m] = sum;
      }
    }
    if (!time_parallel) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int m = 0; m < kColumns; ++m) carry[i][m] = stretch.state[i][m];
      }
    }

    // ---- E: output.
    reduce_rows<kSteps * kColumns, Traits::kRowGroups / 2>(y, row_group);
#pragma unroll
    for (int n = 0; n < Traits::kOutputs; n += Traits::kOutputPack) {
      if (row_group % Traits::kSharers != 0) break;
      const int flat = row_group / Traits::kSharers * Traits::kOutputs + n;
      const int c = flat / kColumns;
      const int m = flat % kColumns;
      Element* out = element_of<Element>(p.y, batch, Index(start + c), head, Index(column + m));
      if constexpr (Traits::kPacked) {
        Pack<Element, Traits::kOutputPack> pack;
#pragma unroll
        for (int e = 0; e < Traits::kOutputPack; ++e)
          pack.at[e] = from_accum<Element>(y[n + e] * static_cast<Accum>(p.scale));
        if (c < steps) *reinterpret_cast<Pack<Element, Traits::kOutputPack>*>(out) = pack;
      } else {
#pragma unroll
        for (int e = 0; e < Traits::kOutputPack; ++e) {
          if (c >= steps || m + e >= columns) continue;
          Accum total = y[n + e] * static_cast<Accum>(p.scale);
          Accum* partial =
              element_of<Accum>(p.partial, batch, Index(start + c), head, Index(column + m + e));
          if (slice.accumulate) total += *partial;
          if (slice.last) {
            out[e] = from_accum<Element>(total);
          } else {
            *partial = total;
          }
        }
      }
    }
  }

  // ---- The lanes that walked the last steps hold the final state.
  if (p.final_state.data != nullptr && warp == warps - 1 && time_group == Traits::kTimeGroups - 1) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index row = row_of<Traits>(row_group, i);
#pragma unroll
      for (int m = 0; m < kColumns; ++m) {
        if (!owns(i, m)) continue;
        Accum last = stretch.state[i][m];
        if (fresh) {  // a sequence without steps
          last = 0;
          if (p.initial_state.data != nullptr)
            last = *element_of<const Accum>(p.initial_state, batch, head, row, Index(column + m));
        }
        *element_of<Accum>(p.final_state, batch, head, row, Index(column + m)) = last;
      }
    }
  }
}

// ============================== PTX in small named functions ==================================

// Address of an object in shared memory, as PTX counts it.
__device__ __forceinline__ uint32_t shared_address(const void* object) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(object));
}

__device__ __forceinline__ void* shared_pointer(uint32_t address) {
  return __cvta_shared_to_generic(address);
}

// Starts a copy of 16 bytes from global to shared memory; zeros arrive if `exists` is false, and
// nothing is read.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

// Programmatic dependent launch, sm_90 and later: lets the next launch of the stream begin as soon
// as every block of this one has come here or ended.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the launch before this one has ended, and its stores are seen. Returns at once where that
// is so from the start.
__device__ __forceinline__ void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Has the L2 cache fetch what will be read: a multiple of 16 bytes. Before sm_90, nothing.
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes));
#endif
}

// Closes a group of copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups are still under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8n ... 8n + 7 name the rows of matrix n. Lane l
// gets elements 2 (l % 4), 2 (l % 4) + 1 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: rows 2 (l % 4), 2 (l % 4) + 1 of column l / 4.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The reverse of load_matrices_transposed, from sm_90 on.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address,
                                                          const uint32_t (&from)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
      : "memory");
}

// An 8 x 8 matrix of 16-bit elements, held as by load_matrices, transposed within the warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t from) {
  uint32_t to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(from));
  return to;
}

// c += a b with a (16, 16), b (16, 8), c (16, 8). With g = l / 4 and two neighbours x = 2 (l % 4)
// and x + 1, lane l holds c[0], c[1]: row g, columns x; c[2], c[3]: row g + 8. a[0]: row g, columns
// x; a[1]: row g + 8; a[2], a[3]: the same 8 columns on. b0: rows x of column g; b1: 8 rows on. So
// the accumulators of two neighbouring c, packed, are one a.
template <typename Element>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);
template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&c)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with a (16, 8), b (8, 8).
template <typename Element>
__device__ __forceinline__ void mma_16x8x8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b);
template <>
__device__ __forceinline__ void mma_16x8x8<__nv_bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                          uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}
template <>
__device__ __forceinline__ void mma_16x8x8<__half>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                   uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// The same with float32 operands, of which the tensor core sees the upper 19 bits (TF32). Lane l
// holds of a rows l / 4 (+ 8), columns l % 4 (a[0], a[1]) and l % 4 + 4 (a[2], a[3]); of b rows
// l % 4 and l % 4 + 4 of column l / 4.
__device__ __forceinline__ void mma_16x8x8_tf32(float (&c)[4], const float (&a)[4], float b0,
                                                float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// ---- Hopper: products of a warpgroup (four warps) that run on their own until waited for.

// What this thread wrote to shared memory so far becomes visible to them.
__device__ __forceinline__ void fence_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// To be called before the first product, and after registers of one were written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from using registers otherwise up to here, or reading them before.
__device__ __forceinline__ void wgmma_hold(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}
__device__ __forceinline__ void wgmma_hold(float (&d)[4]) {
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}

// Describes a matrix in shared memory whose 16-byte chunks are permuted within 128 bytes: groups of
// 8 rows of 128 bytes lie 1024 bytes apart, and panels of 64 elements `panel` bytes. Bit 62 names
// this permutation; distances and the address, 18 bits of it, count in units of 16 bytes.
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address, uint32_t panel) {
  return (uint64_t{1} << 62) | (uint64_t{1024 / 16} << 32) |
         (static_cast<uint64_t>(panel / 16) << 16) | ((address & 0x3ffff) / 16);
}

// d = a b, or d += a b if `add`: a (64, 16), a warp's 16 rows as for mma_16x8x16; b (16, n), with n
// = 16 to 128 by the size of d, a matrix in shared memory with its 16 elements in a row or, if
// kTransposed, its n elements.
template <typename Element, bool kTransposed>
__device__ __forceinline__ void wgmma_64x16(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b,
                                            int add) {
#define GATED_DELTA_WGMMA(type)                                                                   \
  asm volatile(                                                                                   \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1, %14;\n}"            \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), \
        "+f"(d[1][2]), "+f"(d[1][3])                                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed))
  if constexpr (std::is_same_v<Element, __half>) {
    GATED_DELTA_WGMMA("f16");
  } else {
    GATED_DELTA_WGMMA("bf16");
  }
#undef GATED_DELTA_WGMMA
}
template <typename Element, bool kTransposed>
__device__ __forceinline__ void wgmma_64x16(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b,
                                            int add) {
#define GATED_DELTA_WGMMA(type)                                                                   \
  asm volatile(                                                                                   \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                 \
      " "                                                                                         \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                  \
      "{%16, %17, %18, %19}, %20, add, 1, 1, %22;\n}"                                             \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), \
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed))
  if constexpr (std::is_same_v<Element, __half>) {
    GATED_DELTA_WGMMA("f16");
  } else {
    GATED_DELTA_WGMMA("bf16");
  }
#undef GATED_DELTA_WGMMA
}
template <typename Element, bool kTransposed>
__device__ __forceinline__ void wgmma_64x16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                            int add) {
#define GATED_DELTA_WGMMA(type)                                                                   \
  asm volatile(                                                                                   \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                 \
      " "                                                                                         \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "         \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                   \
      "{%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"                                             \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), \
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), \
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), \
        "+f"(d[7][2]), "+f"(d[7][3])                                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed))
  if constexpr (std::is_same_v<Element, __half>) {
    GATED_DELTA_WGMMA("f16");
  } else {
    GATED_DELTA_WGMMA("bf16");
  }
#undef GATED_DELTA_WGMMA
}
template <typename Element, bool kTransposed>
__device__ __forceinline__ void wgmma_64x16(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b,
                                            int add) {
#define GATED_DELTA_WGMMA(type)                                                                   \
  asm volatile(                                                                                   \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                \
      " "                                                                                         \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "         \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "          \
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "          \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                   \
      "{%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"                                             \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), \
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), \
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), \
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), \
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]),               \
        "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]),           \
        "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]),           \
        "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),           \
        "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]),           \
        "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed))
  if constexpr (std::is_same_v<Element, __half>) {
    GATED_DELTA_WGMMA("f16");
  } else {
    GATED_DELTA_WGMMA("bf16");
  }
#undef GATED_DELTA_WGMMA
}
// The same with a in shared memory too; both with their 16 elements in a row.
template <typename Element>
__device__ __forceinline__ void wgmma_64x16(float (&d)[4][4], uint64_t a, uint64_t b, int add) {
#define GATED_DELTA_WGMMA(type)                                                                   \
  asm volatile(                                                                                   \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                 \
      " "                                                                                         \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                  \
      "%16, %17, add, 1, 1, 0, 0;\n}"                                                             \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), \
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])                                \
      : "l"(a), "l"(b), "r"(add))
  if constexpr (std::is_same_v<Element, __half>) {
    GATED_DELTA_WGMMA("f16");
  } else {
    GATED_DELTA_WGMMA("bf16");
  }
#undef GATED_DELTA_WGMMA
}

// ==================================== Tensor-core forward =====================================
//
// For large problems. A block walks over the steps of one (batch, head), or a segment of them, in
// chunks of kTiles tiles of 16 steps; each of its warps, or pairs of warps, owns 16 columns and
// keeps their part of the state as accumulators. With G_t the product of gates from the chunk's
// first step to t, and P[t, s] = scale * q_t . k_s,
//
//   y_t[j] = scale * G_t[j] (q_t . S_before[:, j]) + sum_{s <= t} P[t, s] v_s[j] gates s+1 .. t
//   S_after[:, j] = G_end[j] S_before[:, j] + sum_s k_s (v_s[j] gates s+1 .. end)
//
// The gates between s and t differ for each pair of steps. Dyadic gating makes matrix products of
// the triangular sum all the same, exact for every gate. The highest bit in which s < t of a tile
// differ names a level, 2, 4, 8 or 16: s is in the first half of a block of so many steps, t in the
// second.
//
//   gates s+1 .. t = suffix of the first half, after s  *  prefix of the second half, up to t
//
// Steps 2 = 0b010 and 5 = 0b101, say, have level 8: gates 3 .. 5 = (gate 3) * (gates 4 and 5). So a
// level is one product: P masked to it, times values carried to the end of their half; the prefix
// multiplies the result. P doesn't depend on j. Two tiles of a chunk are one more level.
//
// Everything is transposed: y^T = S^T q^T, S^T += (carried v)^T k. Then values, gates, outputs and
// the state share one layout of registers: a lane has columns `group` and `group + 8` of the warp's
// 16, and of a tile's 16 steps the four from 4 * quad on; and S^T is at once an accumulator and,
// packed, the left operand of S^T q^T. They have the tensor core's places ("slots") 2 quad,
// 2 quad + 1, 2 quad + 8, 2 quad + 9: rows of shared memory are in the order of slots. In arrays,
// [s][h][e], or [s][2 h + e] of accumulators, is step 4 quad + 2 s + e of column group + 8 h.
//
// Where heads are few, time is cut in segments, in two launches that overlap: Walk::kStates finds
// what each segment makes of a zero state, its end, and Walk::kOutputs chains the ends of those
// before its own. Segments that need none, as the first, don't wait for the other launch.
//
// float32 operands are split in two TF32 parts and three products are summed; no accumulator of
// a tensor core, which truncates, outlives one short sum.

// Steps x channels in shared memory, in chunks of 16 bytes, which are permuted within a row so that
// no access below finds two rows in one bank. Channels beyond kPanel lie in further panels.
template <typename T, int kPanel, int kSteps>
struct SharedTile {
  static constexpr int kRowBytes = kPanel * sizeof(T);
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kPanelBytes = kSteps * kRowBytes;

  static __device__ __forceinline__ uint32_t offset(int slot, int chunk) {
    int permuted = chunk ^ (slot & 7);
    if (sizeof(T) == 4) permuted = chunk ^ (slot & 6) ^ (slot << 2 & 4);
    if (kChunks == 4) permuted = chunk ^ (slot >> 1 & 3);
    return slot * kRowBytes + permuted * 16;
  }
  // Of one element; sizeof(T) == 4.
  static __device__ __forceinline__ uint32_t element(int slot, int channel) {
    return offset(slot, channel / 4) + channel % 4 * 4;
  }
};

// What a walk over time is for.
enum class Walk {
  kOutputs,     // y and the final state
  kTraining,    // the same, and checkpoints; apart, for they cost registers that kOutputs lacks
  kStates,      // states alone: checkpoints, or else what each segment makes of a zero state
  kStatesBack,  // the same of the gradients that flow back, from the last step to the first
};

__host__ __device__ constexpr bool leaves_states_alone(Walk walk) {
  return walk == Walk::kStates || walk == Walk::kStatesBack;
}

template <typename Element_, typename Gate_, int kRows_, int kWarps_, int kTiles_, int kBlocks_,
          int kParts_ = 1>
struct TensorTraits {
  using Element = Element_;
  using Gate = Gate_;
  static constexpr int kRows = kRows_;  // of the state; K is padded with zeros
  static constexpr int kWarps = kWarps_;
  static constexpr int kTiles = kTiles_;    // of 16 steps in a chunk: 1 or 2
  static constexpr int kBlocks = kBlocks_;  // that shall fit on a multiprocessor
  static constexpr int kParts = kParts_;    // warps that share 16 columns: 1 or 2
  static_assert(kParts == 1 || (kTiles == 2 && std::is_same_v<Element, float>),
                "a warp of a pair plans one of two tiles; float32 alone gains by it");
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroups = kWarps / kParts;  // of 16 columns
  static constexpr int kColumns = 16 * kGroups;
  static constexpr int kSteps = 16 * kTiles;
  static constexpr bool kFloat = std::is_same_v<Element, float>;
  static constexpr bool kEarly = !kFloat && kRows <= 64;  // read gates long before their use
  // Rows of q and k lie in panels of 128 bytes, as wgmma wants them; float32 ones in one piece.
  static constexpr int kPanel = kFloat || kRows < 64 ? kRows : 64;
  static constexpr bool kWgmma =
      !kFloat && (kRows == 64 || kRows == 128 || kRows == 256) && kWarps % 4 == 0 && kParts == 1;
  using RowTile = SharedTile<Element, kPanel, kSteps>;
  using ColumnTile = SharedTile<Element, kColumns, kSteps>;
  using GateTile = SharedTile<Gate, kColumns, kSteps>;
  // Shared memory: stages of q, k, v and gate, and P of two chunks, in blocks of 16 x 16.
  static constexpr int kRowTile = 16 * RowTile::kRowBytes;
  static constexpr int kRowOperand = kSteps * kRows * sizeof(Element);
  static constexpr int kColumnTile = 16 * kColumns * sizeof(Element);
  static constexpr int kGateTile = 16 * kColumns * sizeof(Gate);
  static constexpr int kStageBytes = 2 * kRowOperand + kTiles * (kColumnTile + kGateTile);
  // Without outputs nobody needs q, and more blocks fit.
  static __host__ __device__ constexpr int stage_bytes(Walk walk) {
    return leaves_states_alone(walk) ? kStageBytes - kRowOperand : kStageBytes;
  }
  static __host__ __device__ constexpr int blocks(Walk walk) {
    return walk == Walk::kStates && kRows == 64 ? kBlocks * 3 / 2 : kBlocks;
  }
  static constexpr int kProducts = kTiles * kTiles;
  static constexpr int kProductBytes = 16 * 16 * sizeof(Element);
  // What the warps of a pair tell each other, of two chunks as well: a tile's decays, and sums for
  // the other one's outputs. A tile's carried values take the place of v, outputs that of gate.
  static constexpr int kDecaysBytes = kParts == 1 ? 0 : kWarps * 64;
  static constexpr int kSumsBytes = kParts == 1 ? 0 : kWarps * 1024;
  static constexpr int kOtherBytes = 2 * (kProducts * kProductBytes + kDecaysBytes + kSumsBytes);
  // Of a segment's end, for each warp: its part of the state and two decays a lane.
  static constexpr int kEndFloats = 32 * (8 * (kRows / 16 / kParts) + 2);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GATED_DELTA_WGMMA
#endif

// What kernels may count on. Where one can't be launched it need not be compiled: before sm_80, and
// where a block has 99 KiB of shared memory, unless later chips will compile the same text.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostSharedBytes = 0;
#elif defined(__CUDA_ARCH__) && !defined(GATED_DELTA_FOR_LATER_CHIPS) && \
    (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kMostSharedBytes = 99 * 1024;
#else
constexpr int kMostSharedBytes = 227 * 1024;
#endif

// Chunks in shared memory: the state's, the next one, of which ChunkPlan is made, the one after it,
// of which P is made, and one that loads.
constexpr int kFewestStages = 4;

struct TensorLaunch {
  int64_t segments = 1;       // of time, one block each; of packed sequences: slots of pieces
  int shift = 0;              // of those pieces
  int64_t segment_steps = 0;  // a multiple of kSteps
  int64_t tiles = 1;          // of columns
  int stages = 0;             // chunks in shared memory
  float scale = 1;
  int64_t parts = 1;            // of a segment, each of which has an end
  int64_t all_parts = 1;        // of the segments; those of Walk::kStates are parts
  float* ends = nullptr;        // (B, H, all_parts, tiles, warps, kEndFloats)
  void* checkpoints = nullptr;  // see Checkpoints
};

// ---- Operands.

// Two neighbours along the axis that a product sums over, ready for the tensor core.
template <typename Element>
struct Operand {
  uint32_t bits;
};
template <>
struct Operand<float> {
  float high[2];
  float low[2];
};

// The upper 19 bits of x times a bit more than 1, so that the rest is as often negative as
// positive: what the tensor core drops of it, and the product of two rests, then average out.
// Rounding to zero keeps large numbers finite.
__device__ __forceinline__ float upper_part(float x) {
  return __uint_as_float(__float_as_uint(__fmul_rz(x, 1.0f + 0x1.6p-12f)) & 0xffffe000u);
}

template <typename Element>
__device__ __forceinline__ Operand<Element> make_operand(float first, float second) {
  if constexpr (std::is_same_v<Element, float>) {
    Operand<float> result;
    result.high[0] = upper_part(first);
    result.high[1] = upper_part(second);
    result.low[0] = first - result.high[0];
    result.low[1] = second - result.high[1];
    return result;
  } else if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return {*reinterpret_cast<const uint32_t*>(&pair)};
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return {*reinterpret_cast<const uint32_t*>(&pair)};
  }
}

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  } else {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
}

// Which elements of an operand a level keeps.
template <typename Element>
struct Mask {
  uint32_t bits;
  __device__ __forceinline__ Mask(bool first, bool second)
      : bits((first ? 0xffffu : 0) | (second ? 0xffff0000u : 0)) {}
  __device__ __forceinline__ Operand<Element> of(Operand<Element> x) const {
    return {x.bits & bits};
  }
};
template <>
struct Mask<float> {
  uint32_t bits[2];
  __device__ __forceinline__ Mask(bool first, bool second)
      : bits{first ? ~0u : 0, second ? ~0u : 0} {}
  __device__ __forceinline__ Operand<float> of(Operand<float> x) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      x.high[e] = __uint_as_float(__float_as_uint(x.high[e]) & bits[e]);
      x.low[e] = __uint_as_float(__float_as_uint(x.low[e]) & bits[e]);
    }
    return x;
  }
};

// c += a b over 8 slots: a (16, 8) in two operands, b (8, 8) in one.
template <typename Element>
__device__ __forceinline__ void multiply_8(float (&c)[4], const Operand<Element>& a0,
                                           const Operand<Element>& a1, const Operand<Element>& b) {
  if constexpr (std::is_same_v<Element, float>) {
    const float high[4] = {a0.high[0], a1.high[0], a0.high[1], a1.high[1]};
    const float low[4] = {a0.low[0], a1.low[0], a0.low[1], a1.low[1]};
    mma_16x8x8_tf32(c, low, b.high[0], b.high[1]);
    mma_16x8x8_tf32(c, high, b.low[0], b.low[1]);
    mma_16x8x8_tf32(c, high, b.high[0], b.high[1]);
  } else {
    mma_16x8x8<Element>(c, a0.bits, a1.bits, b.bits);
  }
}

// c += a b over 16 slots: a (16, 16) in four operands, b (16, 8) in two.
template <typename Element>
__device__ __forceinline__ void multiply_16(float (&c)[4], const Operand<Element> (&a)[4],
                                            const Operand<Element>& b0,
                                            const Operand<Element>& b1) {
  if constexpr (std::is_same_v<Element, float>) {
    multiply_8(c, a[0], a[1], b0);
    multiply_8(c, a[2], a[3], b1);
  } else {
    const uint32_t bits[4] = {a[0].bits, a[1].bits, a[2].bits, a[3].bits};
    mma_16x8x16<Element>(c, bits, b0.bits, b1.bits);
  }
}

// The same for two neighbours c at once: b (16, 16) in four operands. float32 sums join c outside
// the tensor core.
template <typename Element>
__device__ __forceinline__ void multiply_16_add(float (&c0)[4], float (&c1)[4],
                                                const Operand<Element> (&a)[4],
                                                const Operand<Element> (&b)[4]) {
  if constexpr (std::is_same_v<Element, float>) {
    float part[2][4] = {};
    multiply_16(part[0], a, b[0], b[1]);
    multiply_16(part[1], a, b[2], b[3]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      c0[c] += part[0][c];
      c1[c] += part[1][c];
    }
  } else {
    multiply_16(c0, a, b[0], b[1]);
    multiply_16(c1, a, b[2], b[3]);
  }
}

// Row of shared memory in which a step lies.
__device__ __forceinline__ int slot_of(int step) {
  return (step & ~15) | (step & 1) | (step >> 1 & 6) | (step << 2 & 8);
}

__device__ __forceinline__ void wait_for_all_but(int pending) {
  if (pending >= 2) {
    wait_for_copies<2>();
  } else if (pending == 1) {
    wait_for_copies<1>();
  } else {
    wait_for_copies<0>();
  }
}

// Has the compiler keep a value in a register instead of computing it again in every turn.
template <typename T>
__device__ __forceinline__ void keep(T& value) {
  asm volatile("" : "+r"(value));
}
template <typename T>
__device__ __forceinline__ void keep(T*& value) {
  asm volatile("" : "+l"(value));
}

template <typename T>
__device__ __forceinline__ T load_shared(uint32_t address) {
  return *static_cast<const T*>(shared_pointer(address));
}
template <typename T>
__device__ __forceinline__ void store_shared(uint32_t address, T value) {
  *static_cast<T*>(shared_pointer(address)) = value;
}

// A thread's share of loading one operand: always the same chunk, of every kStride-th step. kOnce: what
// lanes of a block have in common of an address is computed once for all; the forward's kernels have
// no registers for that on every architecture.
template <typename T, class Tile, int kChannels, int kSteps, int kThreads, bool kBack = false,
          bool kOnce = false>
struct TileLoader {
  static constexpr int kElements = 16 / sizeof(T);
  static constexpr int kChunks = kChannels / kElements;
  static constexpr int kStride = kThreads / kChunks;
  const View<int64_t>& view;
  const char* from;
  uint32_t place;  // of the first chunk in a tile
  int first;       // step; beyond every end if the thread's channels don't exist

  __device__ __forceinline__ TileLoader(const View<int64_t>& view, int64_t batch, int64_t start,
                                        int64_t head, int64_t channel, int64_t channels)
      : view(view), place(place_of(threadIdx.x / kChunks)), first(threadIdx.x / kChunks) {
    const int lane_channel = threadIdx.x % kChunks * kElements;
    if constexpr (kOnce) {
      from = reinterpret_cast<const char*>(element_of<const T>(view, batch, start, head, channel) +
                                           first * view.stride[1] + lane_channel);
    } else {
      from = reinterpret_cast<const char*>(
          element_of<const T>(view, batch, start + first, head, channel + lane_channel));
    }
    if (channel + lane_channel >= channels) first = INT32_MAX / 2;
  }

  // Starts the next kSteps steps on their way; those from `steps` on don't exist.
  __device__ __forceinline__ void start(uint32_t tile, int steps) {
    for_each_chunk(tile, steps, [](uint32_t to, const char* source, bool whole) {
      copy_async(to, source, whole);
    });
  }

  // The same of an operand that has one element for all channels.
  __device__ __forceinline__ void spread(uint32_t tile, int steps) {
    for_each_chunk(tile, steps, [](uint32_t to, const char* source, bool whole) {
      Pack<T, kElements> copies = {};
      if (whole) {
        const T element =
            *reinterpret_cast<const T*>(source - (kOnce ? threadIdx.x % kChunks * 16 : 0));
#pragma unroll
        for (int e = 0; e < kElements; ++e) copies.at[e] = element;
      }
      store_shared(to, copies);
    });
  }

 private:
  template <class Work>
  __device__ __forceinline__ void for_each_chunk(uint32_t tile, int steps, const Work& work) {
    const int64_t step_bytes = view.stride[1] * static_cast<int64_t>(sizeof(T));
    const int left = steps - first;
#pragma unroll
    for (int n = 0; n < kSteps; n += kStride) {
      if (kStride > kSteps && threadIdx.x / kChunks >= kSteps) break;
      // 16 steps on, the place in a row is the same; 8 steps on, it is 4 slots and 4 chunks away.
      uint32_t at = place + n / 16 * 16 * Tile::kRowBytes;
      if constexpr (kStride == 8 && Tile::kChunks >= 8) {
        at = (place ^ n % 16 * 8) + (n / 16 * 16 + n % 16 / 2) * Tile::kRowBytes;
      } else if constexpr (kStride % 16 != 0) {
        at = place_of(n + threadIdx.x / kChunks);
      }
      work(tile + at, from + n * step_bytes, n < left);
    }
    from += (kBack ? -kSteps : kSteps) * step_bytes;
  }

  static __device__ __forceinline__ uint32_t place_of(int step) {
    const int chunk = threadIdx.x % kChunks;
    return chunk / Tile::kChunks * Tile::kPanelBytes +
           Tile::offset(slot_of(step), chunk % Tile::kChunks);
  }
};

// ---- Reading tiles as operands.

// Where a lane's elements lie within 16 slots of a tile of q or k.
template <class Traits>
struct RowFragments {
  using Element = typename Traits::Element;
  using Tile = typename Traits::RowTile;
  using Elements = Operand<Element>;
  uint32_t left;   // a lane's place for a left operand, or the transposed one
  uint32_t right;  // for a right operand
  uint32_t next;   // float32: of the next slot, transposed
  uint32_t eight;  // for 8 slots of a right operand, of 32 rows

  __device__ __forceinline__ explicit RowFragments(int lane = threadIdx.x % 32) {
    const int group = lane / 4;
    const int quad = lane % 4;
    if constexpr (Traits::kFloat) {
      right = Tile::element(group, 2 * quad);
      left = Tile::element(2 * quad, group);
      next = Tile::element(2 * quad + 1, group);
      eight = right;
    } else {
      left = Tile::offset(lane % 16, lane / 16);
      right = Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      next = 0;
      eight = Tile::offset(lane % 8, lane / 8);
    }
  }

  // Of the rows from 16 kk on.
  __device__ __forceinline__ RowFragments rows_from(int kk) const {
    RowFragments moved = *this;
    moved.left = at_rows(left, kk);
    moved.right = at_rows(right, kk);
    moved.next = at_rows(next, kk);
    return moved;
  }

  // The same place 16 kk rows on.
  static __device__ __forceinline__ uint32_t at_rows(uint32_t address, int kk) {
    constexpr int kBytes = 16 * sizeof(Element);
    constexpr int kPerPanel = Tile::kRowBytes / kBytes;
    return (address ^ (kk % kPerPanel * kBytes)) + kk / kPerPanel * Tile::kPanelBytes;
  }

  static __device__ __forceinline__ Elements pair_at(uint32_t address) {
    const float2 pair = load_shared<float2>(address);
    return make_operand<Element>(pair.x, pair.y);
  }

  // Slots 0 ... 15 and rows 16 kk ... 16 kk + 15 as left operand (slots, rows).
  __device__ __forceinline__ void load_left(Elements (&to)[4], uint32_t tile, int kk) const {
    if constexpr (Traits::kFloat) {
      const uint32_t at = at_rows(tile + right, kk);
      to[0] = pair_at(at);
      to[1] = pair_at(at + 8 * Tile::kRowBytes);
      to[2] = pair_at(at ^ 32);
      to[3] = pair_at((at ^ 32) + 8 * Tile::kRowBytes);
    } else {
      uint32_t words[4];
      load_matrices(words, at_rows(tile + left, kk));
#pragma unroll
      for (int n = 0; n < 4; ++n) to[n].bits = words[n];
    }
  }

  // The same as right operand (rows, slots): to[0], to[1] for slots 0 ... 7, to[2], to[3] for the
  // others.
  __device__ __forceinline__ void load_right(Elements (&to)[4], uint32_t tile, int kk) const {
    if constexpr (Traits::kFloat) {
      const uint32_t at = at_rows(tile + right, kk);
      to[0] = pair_at(at);
      to[1] = pair_at(at ^ 32);
      to[2] = pair_at(at + 8 * Tile::kRowBytes);
      to[3] = pair_at((at ^ 32) + 8 * Tile::kRowBytes);
    } else {
      uint32_t words[4];
      load_matrices(words, at_rows(tile + right, kk));
#pragma unroll
      for (int n = 0; n < 4; ++n) to[n].bits = words[n];
    }
  }

  // Slots 8 half ... 8 half + 7 as right operand (rows, slots): to[0], to[1] for rows 16 kk ... and
  // to[2], to[3] for the 16 after them.
  __device__ __forceinline__ void load_eight(Elements (&to)[4], uint32_t tile, int half,
                                             int kk) const {
    const uint32_t at = tile + half * 8 * Tile::kRowBytes + eight;
    if constexpr (Traits::kFloat) {
#pragma unroll
      for (int n = 0; n < 4; ++n) to[n] = pair_at(at_rows(at, kk + n / 2) ^ n % 2 * 32);
    } else {
      uint32_t words[4];
      load_matrices(words, at_rows(at, kk));
#pragma unroll
      for (int n = 0; n < 4; ++n) to[n].bits = words[n];
    }
  }

  // Slots 0 ... 15 and rows 16 kk ... 16 kk + 15 as left operand (rows, slots).
  __device__ __forceinline__ void load_left_transposed(Elements (&to)[4], uint32_t tile,
                                                       int kk) const {
    if constexpr (Traits::kFloat) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t flip = n % 2 * 32;
        const uint32_t down = n / 2 * 8 * Tile::kRowBytes;
        to[n] = make_operand<Element>(load_shared<float>((at_rows(tile + left, kk) ^ flip) + down),
                                      load_shared<float>((at_rows(tile + next, kk) ^ flip) + down));
      }
    } else {
      uint32_t words[4];
      load_matrices_transposed(words, at_rows(tile + right, kk));
#pragma unroll
      for (int n = 0; n < 4; ++n) to[n].bits = words[n];
    }
  }

  // Like load_right as right operand (slots, rows): to[0], to[1] for the first 8 rows.
  __device__ __forceinline__ void load_transposed(Elements (&to)[4], uint32_t tile, int kk) const {
    if constexpr (Traits::kFloat) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t flip = n / 2 * 32;
        const uint32_t down = n % 2 * 8 * Tile::kRowBytes;
        to[n] = make_operand<Element>(load_shared<float>((at_rows(tile + left, kk) ^ flip) + down),
                                      load_shared<float>((at_rows(tile + next, kk) ^ flip) + down));
      }
    } else {
      uint32_t words[4];
      load_matrices_transposed(words, at_rows(tile + left, kk));
#pragma unroll
      for (int n = 0; n < 4; ++n) to[n].bits = words[n];
    }
  }
};

// Where a lane's 8 elements [s][h][e] of its warp's 16 columns lie in a tile of v, the gate or y.
template <typename T, class Tile>
struct ColumnFragments {
  uint32_t at[2];  // of a matrix row; or of the elements e = 0 and 1
  int first_chunk;

  __device__ __forceinline__ explicit ColumnFragments(int first_column,
                                                      int lane = threadIdx.x % 32) {
    if constexpr (sizeof(T) == 4) {
      at[0] = Tile::element(lane % 4 * 2, first_column + lane / 4);
      at[1] = Tile::element(lane % 4 * 2 + 1, first_column + lane / 4);
    } else {
      at[0] = Tile::offset(lane % 8 + lane / 16 * 8, first_column / 8 + lane / 8 % 2);
      at[1] = 0;
    }
    first_chunk = first_column / 8;
  }

  __device__ __forceinline__ uint32_t element(uint32_t tile, int s, int h, int e) const {
    return ((tile + at[e]) ^ (h * 32)) + s * 8 * Tile::kRowBytes;
  }

  // Also as left operand (columns, slots), which costs nothing for 16-bit types.
  __device__ __forceinline__ void load(float (&to)[2][2][2], Operand<T> (&operand)[4],
                                       uint32_t tile) const {
    uint32_t words[4];
    if constexpr (sizeof(T) == 2) load_matrices_transposed(words, tile + at[0]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float (&pair)[2] = to[n / 2][n % 2];
      if constexpr (sizeof(T) == 2) {
        operand[n].bits = words[n];
        const float2 values = unpack<T>(words[n]);
        pair[0] = values.x;
        pair[1] = values.y;
      } else {
        pair[0] = load_shared<float>(element(tile, n / 2, n % 2, 0));
        pair[1] = load_shared<float>(element(tile, n / 2, n % 2, 1));
        operand[n] = make_operand<T>(pair[0], pair[1]);
      }
    }
  }

  __device__ __forceinline__ void store(const float (&y)[2][4], uint32_t tile) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (sizeof(T) == 2) {
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        words[n] = make_operand<T>(y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]).bits;
      }
      store_matrices_transposed(tile + at[0], words);
      return;
    }
#endif
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int s = n / 4;
      const int h = n / 2 % 2;
      const int e = n % 2;
      if constexpr (sizeof(T) == 4) {
        store_shared(element(tile, s, h, e), y[s][2 * h + e]);
      } else {
        const int lane = threadIdx.x % 32;
        const uint32_t row = tile + Tile::offset(lane % 4 * 2 + 8 * s + e, first_chunk + h);
        store_shared(row + lane / 4 * 2, from_accum<T>(y[s][2 * h + e]));
      }
    }
  }
};

// ---- The levels inside a tile.

// What each level keeps of P.
template <typename Element>
struct LevelMasks {
  Mask<Element> same;   // a step's own value
  Mask<Element> pair;   // from the first step of a pair to the second
  Mask<Element> quad;   // from the first pair of four to the second
  Mask<Element> eight;  // from the first four of eight to the second
  Mask<Element> whole;  // from the first eight of sixteen to the second

  // P's columns, the steps that give, go by quad; its rows, the steps that take, by group.
  __device__ __forceinline__ LevelMasks(int group, int quad)
      : same(group == 2 * quad, group == 2 * quad + 1),
        pair(group == 2 * quad + 1, false),
        quad(group / 2 == quad, group / 2 == quad),
        eight(quad % 2 == 0 && group / 2 == quad + 1, quad % 2 == 0 && group / 2 == quad + 1),
        whole(quad < 2 && group >= 4, quad < 2 && group >= 4) {}
};

// The same of P's transpose, but for `same`, which is alike.
template <typename Element>
struct TransposedMasks {
  Mask<Element> pair;
  Mask<Element> quad;
  Mask<Element> eight;
  Mask<Element> whole;

  __device__ __forceinline__ TransposedMasks(int group, int quad)
      : pair(false, group == 2 * quad),
        quad(group / 2 == quad, group / 2 == quad),
        eight(group / 2 % 2 == 0 && quad == group / 2 + 1,
              group / 2 % 2 == 0 && quad == group / 2 + 1),
        whole(group < 4 && quad >= 2, group < 4 && quad >= 2) {}
};

// A 16 x 16 block of P as right operand: at[2 n + m] has slots 8 n ... of k and 8 m ... of q.
template <typename Element>
struct Products {
  Operand<Element> at[4];

  static __device__ __forceinline__ void store(uint32_t block, const float (&p)[2][4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (std::is_same_v<Element, float>) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        store_shared(block + n * 512 + lane * 16, make_float4(p[n][0], p[n][1], p[n][2], p[n][3]));
      }
    } else {
      store_shared(block + lane * 16, make_uint4(make_operand<Element>(p[0][0], p[0][1]).bits,
                                                 make_operand<Element>(p[0][2], p[0][3]).bits,
                                                 make_operand<Element>(p[1][0], p[1][1]).bits,
                                                 make_operand<Element>(p[1][2], p[1][3]).bits));
    }
  }

  // Only slots 8 n ... 8 n + 7 of k.
  static __device__ __forceinline__ void store_half(uint32_t block, int n, const float (&p)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (std::is_same_v<Element, float>) {
      store_shared(block + n * 512 + lane * 16, make_float4(p[0], p[1], p[2], p[3]));
    } else {
      store_shared(block + lane * 16 + n * 8, make_uint2(make_operand<Element>(p[0], p[1]).bits,
                                                         make_operand<Element>(p[2], p[3]).bits));
    }
  }

  __device__ __forceinline__ void load(uint32_t block) {
    const int lane = threadIdx.x % 32;
    if constexpr (std::is_same_v<Element, float>) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float4 c = load_shared<float4>(block + n * 512 + lane * 16);
        at[2 * n] = make_operand<Element>(c.x, c.y);
        at[2 * n + 1] = make_operand<Element>(c.z, c.w);
      }
    } else {
      const uint4 words = load_shared<uint4>(block + lane * 16);
      at[0].bits = words.x;
      at[1].bits = words.y;
      at[2].bits = words.z;
      at[3].bits = words.w;
    }
  }
};

// Two neighbours of an 8 x 8 matrix as operand of the transposed matrix.
template <typename Element>
__device__ __forceinline__ Operand<Element> transposed_operand(float first, float second) {
  if constexpr (std::is_same_v<Element, float>) {
    const uint32_t a = __float_as_uint(first);
    const uint32_t b = __float_as_uint(second);
    const uint32_t high = transpose_matrix(__byte_perm(a, b, 0x7632));
    const uint32_t low = transpose_matrix(__byte_perm(a, b, 0x5410));
    return make_operand<Element>(__uint_as_float(__byte_perm(low, high, 0x5410)),
                                 __uint_as_float(__byte_perm(low, high, 0x7632)));
  } else {
    return {transpose_matrix(make_operand<Element>(first, second).bits)};
  }
}

template <typename Element>
__device__ __forceinline__ Operand<Element> transposed_operand(const Operand<Element>& from) {
  if constexpr (std::is_same_v<Element, float>) {
    return transposed_operand<Element>(from.high[0] + from.low[0], from.high[1] + from.low[1]);
  } else {
    return {transpose_matrix(from.bits)};
  }
}

// For a block of P that is wanted transposed too, 16-bit elements lie in memory as four matrices,
// one after the other.
template <typename Element>
struct TwoWayProducts : Products<Element> {
  using Products<Element>::at;

  static __device__ __forceinline__ void store(uint32_t block, const float (&p)[2][4]) {
    if constexpr (std::is_same_v<Element, float>) {
      Products<float>::store(block, p);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float (&four)[4] = p[n / 2];
        store_shared(block + n * 128 + threadIdx.x % 32 * 4,
                     make_operand<Element>(four[n % 2 * 2], four[n % 2 * 2 + 1]).bits);
      }
    }
  }

  __device__ __forceinline__ void load(uint32_t block) {
    if constexpr (std::is_same_v<Element, float>) {
      Products<float>::load(block);
    } else {
      uint32_t words[4];
      load_matrices(words, block + threadIdx.x % 32 * 16);
#pragma unroll
      for (int n = 0; n < 4; ++n) at[n].bits = words[n];
    }
  }

  __device__ __forceinline__ void load_transposed(uint32_t block) {
    if constexpr (std::is_same_v<Element, float>) {
      Products<float> from;
      from.load(block);
#pragma unroll
      for (int n = 0; n < 4; ++n) at[n] = transposed_operand(from.at[n % 2 * 2 + n / 2]);
    } else {
      const uint32_t lane = threadIdx.x % 32;
      uint32_t words[4];
      load_matrices_transposed(words, block + (lane & 7) * 16 + (lane & 8) * 32 + (lane & 16) * 8);
#pragma unroll
      for (int n = 0; n < 4; ++n) at[n].bits = words[n];
    }
  }
};

// Dyadic gating: 16 steps of a warp's 16 columns. A lane has four steps of each of its columns, so
// levels 2 and 4 stay within it, and levels 8 and 16 take an exchange of decays each.
template <class Traits>
struct TimeTile {
  using Element = typename Traits::Element;
  float value[2][2][2];  // v, carried further level by level; in the end to the tile's end
  float gate[2][2][2];
  Operand<Element> plain[4];  // v as it came
  float pair[2][2];           // products of gates: of a pair of steps
  float decay[2];             // of the whole tile
  float before_eight[2];      // of the four steps before the lane's own in its eight; else 1
  float after_eight[2];       // of the four steps after them; else 1
  float before_sixteen[2];    // of the eight steps before the lane's own eight in the tile; else 1
  float after_sixteen[2];     // of the eight steps after it; else 1
  float own[2][4];            // what each step gets from itself, and over each level
  float over_pair[2][4];
  float over_quad[4];
  float over_eight[2][4];
  float over_sixteen[2][4];

  __device__ __forceinline__ void pack(Operand<Element> (&to)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      to[n] = make_operand<Element>(value[n / 2][n % 2][0], value[n / 2][n % 2][1]);
    }
  }

  __device__ __forceinline__ void multiply_gates() {
    const int quad_index = threadIdx.x % 4;
    float quad[2];
    float eight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pair[0][h] = gate[0][h][0] * gate[0][h][1];
      pair[1][h] = gate[1][h][0] * gate[1][h][1];
      quad[h] = pair[0][h] * pair[1][h];
    }
    exchange(quad, 1, quad_index % 2 == 1, before_eight, after_eight, eight);
    exchange(eight, 2, quad_index / 2 == 1, before_sixteen, after_sixteen, decay);
  }

  // After multiply_gates. Carries values level by level to the tile's end; with kOutputs,
  // multiplies them on the way by what each level keeps of P.
  template <bool kOutputs>
  __device__ __forceinline__ void scan(const Products<Element>& products,
                                       const LevelMasks<Element>& masks) {
    const auto& p = products.at;
    Operand<Element> carried[4];
    if constexpr (kOutputs) {
      multiply_masked_8(own[0], plain[0], plain[1], masks.same.of(p[0]));
      multiply_masked_8(own[1], plain[2], plain[3], masks.same.of(p[3]));
      multiply_masked_8(over_pair[0], plain[0], plain[1], masks.pair.of(p[0]));
      multiply_masked_8(over_pair[1], plain[2], plain[3], masks.pair.of(p[3]));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) value[n / 2][n % 2][0] *= gate[n / 2][n % 2][1];
    if constexpr (kOutputs) {
      multiply_masked_8(over_quad, make_operand<Element>(value[0][0][0], value[0][0][1]),
                        make_operand<Element>(value[0][1][0], value[0][1][1]), masks.quad.of(p[1]));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) value[0][n / 2][n % 2] *= pair[1][n / 2];
    if constexpr (kOutputs) {
      pack(carried);
      multiply_masked_16(over_eight, carried, p, masks.eight);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) value[n / 4][n / 2 % 2][n % 2] *= after_eight[n / 2 % 2];
    if constexpr (kOutputs) {
      pack(carried);
      multiply_masked_16(over_sixteen, carried, p, masks.whole);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) value[n / 4][n / 2 % 2][n % 2] *= after_sixteen[n / 2 % 2];
  }

  // `through` times the gates from the tile's first to each step's own.
  __device__ __forceinline__ void multiply_prefixes(const float (&through)[2],
                                                    float (&factor)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float first = through[h] * (before_sixteen[h] * before_eight[h]);
      const float second = first * pair[0][h];
      factor[0][2 * h] = first * gate[0][h][0];
      factor[0][2 * h + 1] = first * pair[0][h];
      factor[1][2 * h] = second * gate[1][h][0];
      factor[1][2 * h + 1] = second * pair[1][h];
    }
  }

  // Going back in time: values are carried to what comes before the tile.
  __device__ __forceinline__ void carry_back(const float (&through)[2]) {
    float factor[2][4];
    multiply_prefixes(through, factor);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int h = n / 2 % 2;
      value[n / 4][h][n % 2] *= factor[n / 4][2 * h + n % 2];
    }
  }

  // What the tile's steps get: factor * (what reaches the tile, times `through`) + inside. In comes
  // `from_first`, what they get from the chunk's first tile without decay. As in Horner's rule,
  // from the longest level down, each sum takes the gates from its level's border to the next
  // shorter one's, and that level's sum is added.
  __device__ __forceinline__ void finish(const float (&through)[2], bool is_first,
                                         const float (&from_first)[2][4], float (&factor)[2][4],
                                         float (&inside)[2][4]) const {
    multiply_prefixes(through, factor);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int h = c / 2;
        const int e = c % 2;
        float sum = over_sixteen[s][c];
        if (!is_first) sum = fmaf(before_sixteen[h], from_first[s][c], sum);
        sum = fmaf(before_eight[h], sum, over_eight[s][c]);
        if (s == 1) sum = fmaf(pair[0][h], sum, over_quad[c]);
        if (e == 1) sum = fmaf(gate[s][h][0], sum, over_pair[s][c]);
        inside[s][c] = fmaf(gate[s][h][e], sum, own[s][c]);
      }
    }
  }

 private:
  static __device__ __forceinline__ void multiply_masked_8(float (&to)[4],
                                                           const Operand<Element>& a0,
                                                           const Operand<Element>& a1,
                                                           const Operand<Element>& b) {
    to[0] = to[1] = to[2] = to[3] = 0;
    multiply_8(to, a0, a1, b);
  }
  static __device__ __forceinline__ void multiply_masked_16(float (&to)[2][4],
                                                            const Operand<Element> (&a)[4],
                                                            const Operand<Element> (&p)[4],
                                                            const Mask<Element>& mask) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      to[n][0] = to[n][1] = to[n][2] = to[n][3] = 0;
      multiply_16(to[n], a, mask.of(p[n]), mask.of(p[n + 2]));
    }
  }

  // Products of blocks twice as long, and what the other half means to the lane's own.
  static __device__ __forceinline__ void exchange(const float (&half)[2], int distance, bool second,
                                                  float (&before)[2], float (&after)[2],
                                                  float (&both)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float other = __shfl_xor_sync(~0u, half[h], distance);
      before[h] = second ? other : 1.0f;
      after[h] = second ? 1.0f : other;
      both[h] = half[h] * other;
    }
  }
};

// What a chunk does to the state S before it, and gets from it: y = factor * (q . S) + inside, and
// S after it = decay * S + carried^T k. None of this waits for S.
template <class Traits>
struct ChunkPlan {
  using Element = typename Traits::Element;
  using Gate = typename Traits::Gate;
  static constexpr int kTiles = Traits::kTiles;
  float value[kTiles][2][2][2];  // carried to the chunk's end
  float decay[2];
  float factor[kTiles][2][4];
  float inside[kTiles][2][4];

  // As left operand (columns, slots).
  __device__ __forceinline__ void carried(Operand<Element> (&to)[4], int u) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      to[n] = make_operand<Element>(value[u][n / 2][n % 2][0], value[u][n / 2][n % 2][1]);
    }
  }

  // Takes in the chunk's first tile, or its second.
  template <Walk kWalk, int u>
  __device__ __forceinline__ void take(TimeTile<Traits>& tile, float scale, uint32_t products,
                                       const LevelMasks<Element>& masks) {
    constexpr bool kOutputs = kWalk == Walk::kOutputs || kWalk == Walk::kTraining;
    constexpr bool kBack = kWalk == Walk::kStatesBack;
    Products<Element> within;
    if constexpr (kOutputs) within.load(products + (u * kTiles + u) * Traits::kProductBytes);
    if constexpr (kBack) {
      const float through[2] = {u == 0 ? scale : scale * decay[0],
                                u == 0 ? scale : scale * decay[1]};
      tile.carry_back(through);
    } else {
      tile.template scan<kOutputs>(within, masks);
    }
    if constexpr (kOutputs) {
      float through[2] = {scale, scale};
      float from_first[2][4] = {};
      if constexpr (u == 1) {
        through[0] *= decay[0];
        through[1] *= decay[1];
        Products<Element> across;
        across.load(products + u * kTiles * Traits::kProductBytes);
        Operand<Element> first[4];
        carried(first, 0);
        multiply_16(from_first[0], first, across.at[0], across.at[2]);
        multiply_16(from_first[1], first, across.at[1], across.at[3]);
      }
      tile.finish(through, u == 0, from_first, factor[u], inside[u]);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int h = n / 2 % 2;
      if constexpr (u == 1 && !kBack) value[0][n / 4][h][n % 2] *= tile.decay[h];
      value[u][n / 4][h][n % 2] = tile.value[n / 4][h][n % 2];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) decay[h] = u == 0 ? tile.decay[h] : decay[h] * tile.decay[h];
  }
};

// For a pair of warps, the plan of one of a chunk's two tiles: its steps get factor * (what reaches
// the tile) + inside.
template <class Traits>
struct TilePlan {
  float factor[2][4];
  float inside[2][4];
};

template <class Traits>
struct TensorOwner {
  int group;
  int quad;
  int tile;  // of columns
  int segment;
  int first_segment;  // of its batch or sequence
  int pair;           // of batch and head
  int batch;
  int head;
  int first_column;  // of the block
  int part;          // of the state's rows
  int columns;       // 16 of the block's
  int column;
  int start;  // of its steps
  int steps;
  bool exists = true;
  bool last;  // of the segments of its batch or sequence

  __device__ __forceinline__ TensorOwner(const Params& p, const TensorLaunch& launch,
                                         uint32_t block, uint32_t thread) {
    const int lane = thread % 32;
    const int warp = thread / 32;
    const uint32_t tiles = launch.tiles;
    const uint32_t segments = launch.segments;
    const uint32_t heads = p.H;
    const uint32_t row = block / tiles;
    group = lane / 4;
    quad = lane % 4;
    tile = block - row * tiles;
    pair = row / segments;
    segment = row - pair * segments;
    batch = pair / heads;
    head = pair - batch * heads;
    if (p.borders == nullptr) {
      const int64_t end = p.end == nullptr ? p.T : min(p.T, *p.end);
      start = segment * launch.segment_steps;
      steps = max(min(end - start, launch.segment_steps), int64_t{0});
      first_segment = 0;
      last = segment + 1 == launch.segments;
    } else {
      const Piece piece = piece_of(p.borders, p.sequences, launch.shift, segment);
      batch = static_cast<int>(piece.sequence);
      start = static_cast<int>(piece.start);
      steps = static_cast<int>(piece.steps);
      exists = piece.exists;
      first_segment = static_cast<int>(first_slot(p.borders, launch.shift, batch));
      last = piece.last;
    }
    first_column = tile * Traits::kColumns;
    part = Traits::kParts == 1 ? 0 : warp / Traits::kGroups;
    columns = Traits::kParts == 1 ? warp : warp % Traits::kGroups;
    column = first_column + columns * 16;
  }

  // Element [n][c] of the state: row 8 n + 2 quad + c % 2 of the part, column group + 8 (c / 2).
  __device__ __forceinline__ int64_t row_at(int n, int c) const {
    return part * (Traits::kRows / Traits::kParts) + 8 * n + 2 * quad + c % 2;
  }
  __device__ __forceinline__ int64_t column_at(int c) const { return column + group + c / 2 * 8; }

  // The lane's share of what the warp keeps of an end: element [n] of the state is at 128 n, the
  // decays of its two columns come last.
  __device__ __forceinline__ float* end_at(const TensorLaunch& launch, int64_t number) const {
    const int64_t row = (pair * launch.all_parts + number) * launch.tiles + tile;
    return launch.ends + (row * Traits::kWarps + threadIdx.x / 32) * Traits::kEndFloats +
           threadIdx.x % 32 * 4;
  }
  template <typename Float>
  static __device__ __forceinline__ auto* decays_at(Float* end) {
    using Two = std::conditional_t<std::is_const_v<Float>, const float2, float2>;
    return reinterpret_cast<Two*>(end + Traits::kEndFloats - 64 - threadIdx.x % 32 * 2);
  }
  static __device__ __forceinline__ int64_t end_stride(const TensorLaunch& launch) {
    return launch.tiles * (Traits::kWarps * Traits::kEndFloats);
  }
};

// States that a walk leaves behind, one before every kCheckpointSteps steps; in a walk back flows,
// one after them. For each (batch, head), checkpoint and 16 columns: blocks of 16 x 16 elements in
// the order in which a warp holds them as left operand (columns, rows).
constexpr int kCheckpointSteps = 64;

template <typename Element>
struct Checkpoints {
  static constexpr int kBlock = 256;  // elements
  int count;                          // for each (batch, head)
  int row_blocks;
  int column_blocks;

  __device__ __forceinline__ explicit Checkpoints(const Params& p)
      : count(static_cast<int>((p.T + kCheckpointSteps - 1) / kCheckpointSteps)),
        row_blocks(static_cast<int>((p.K + 15) / 16)),
        column_blocks(static_cast<int>((p.V + 15) / 16)) {}

  __device__ __forceinline__ int64_t elements() const {
    return static_cast<int64_t>(column_blocks) * row_blocks * kBlock;
  }

  // A lane's part of the blocks of 16 columns.
  template <typename Pointer>
  __device__ __forceinline__ Pointer* at(Pointer* all, int64_t pair, int64_t number,
                                         int64_t columns) const {
    const int64_t row = (pair * count + number) * column_blocks + columns;
    return all + row * row_blocks * kBlock + threadIdx.x % 32 * (16 / sizeof(Element));
  }

  static __device__ __forceinline__ void store(Element* to, const float (&first)[4],
                                               const float (&second)[4]) {
    if constexpr (std::is_same_v<Element, float>) {
      *reinterpret_cast<float4*>(to) = make_float4(first[0], first[1], first[2], first[3]);
      *reinterpret_cast<float4*>(to + kBlock / 2) =
          make_float4(second[0], second[1], second[2], second[3]);
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(make_operand<Element>(first[0], first[1]).bits,
                                                 make_operand<Element>(first[2], first[3]).bits,
                                                 make_operand<Element>(second[0], second[1]).bits,
                                                 make_operand<Element>(second[2], second[3]).bits);
    }
  }
};

// ---- The kernel.
//
// In one turn of the loop a warp takes the state past one chunk, makes the plan of the next, and
// its share of P for the one after: three strands that don't wait for each other.
//
// Warps of a pair share columns; each has half of the state's rows and plans one of a chunk's two
// tiles. They exchange through shared memory, one turn later: the tiles' carried values and decays,
// which both need when the chunk comes to the state, and then what each half of the state gives to
// the other's tile. So a chunk's outputs leave one turn after the state has passed it.

// The final state of a sequence without steps: its initial one.
template <class Traits>
__device__ __forceinline__ void copy_state(const Params& p, const TensorOwner<Traits>& owner) {
  if (p.final_state.data == nullptr) return;
  for (int64_t n = threadIdx.x; n < p.K * Traits::kColumns; n += Traits::kThreads) {
    const int64_t row = n / Traits::kColumns;
    const int64_t column = owner.first_column + n % Traits::kColumns;
    if (column >= p.V) continue;
    float state = 0;
    if (p.initial_state.data != nullptr)
      state = *element_of<const float>(p.initial_state, owner.batch, owner.head, row, column);
    *element_of<float>(p.final_state, owner.batch, owner.head, row, column) = state;
  }
}

// The end of the last packed sequence, or T.
__device__ __forceinline__ int64_t end_of_steps(const Params& p) {
  return p.end == nullptr ? p.T : min(max(*p.end, int64_t{0}), p.T);
}

// Does a packed sequence start in these steps? They begin with a word of `starts`.
__device__ __forceinline__ bool has_starts(const uint32_t* starts, int64_t start, int64_t steps) {
  bool found = false;
  for (int64_t n = threadIdx.x % 32 * 32; n < steps; n += 1024) {
    if (starts[(start + n) / 32] != 0) found = true;
  }
  return __any_sync(~0u, found);
}

// Steps before the segment's last whole word of `starts` with a bit: its end state forgets them.
__device__ __forceinline__ int forgotten_steps(const uint32_t* starts, int64_t start, int steps) {
  const int64_t first_word = start / 32;
  for (int64_t word = (start + steps - 1) / 32; word >= first_word; word -= 32) {
    const int64_t own = word - threadIdx.x % 32;
    bool found = own >= first_word && starts[own] != 0;
    if (found && (own * 32 < start || own * 32 + 32 > start + steps)) found = false;
    const uint32_t all = __ballot_sync(~0u, found);
    if (all != 0) return static_cast<int>((word - (__ffs(all) - 1)) * 32 - start);
  }
  return 0;
}

// Steps of a segment up to the end of its first whole word of `starts` that has a bit: nothing
// flows back to its beginning from beyond.
__device__ __forceinline__ int reached_steps(const uint32_t* starts, int64_t start, int steps) {
  const int64_t last_word = (start + steps - 1) / 32;
  for (int64_t word = start / 32; word <= last_word; word += 32) {
    const int64_t own = word + threadIdx.x % 32;
    const bool whole = own * 32 >= start && own * 32 + 32 <= start + steps;
    const uint32_t all = __ballot_sync(~0u, own <= last_word && whole && starts[own] != 0);
    if (all != 0) return static_cast<int>((word + __ffs(all)) * 32 - start);
  }
  return steps;
}

template <class Traits, Walk kWalk>
__device__ __forceinline__ void tensor_block(const Params& p, const TensorLaunch& launch) {
  constexpr bool kStateOnly = leaves_states_alone(kWalk);
  constexpr bool kBack = kWalk == Walk::kStatesBack;
  using Element = typename Traits::Element;
  using Gate = typename Traits::Gate;
  constexpr int kTiles = Traits::kTiles;
  constexpr int kSteps = Traits::kSteps;
  constexpr int kParts = Traits::kParts;
  constexpr int kSixteens = Traits::kRows / 16;
  constexpr int kOwnSixteens = kSixteens / kParts;  // of the warp's part of the state
#ifdef GATED_DELTA_WGMMA
  constexpr bool kWgmma = Traits::kWgmma;
#else
  constexpr bool kWgmma = false;
#endif
  // The largest state leaves no registers for all of its own operands at once.
  constexpr bool kAllWgmma = kWgmma && kSixteens <= 8;
  constexpr uint32_t kStageBytes = Traits::stage_bytes(kWalk);
  constexpr uint32_t kOfK = kStateOnly ? 0 : Traits::kRowOperand;
  constexpr uint32_t kOfV = kOfK + Traits::kRowOperand;
  constexpr uint32_t kOfGate = kOfV + kTiles * Traits::kColumnTile;
  extern __shared__ __align__(1024) unsigned char tensor_memory[];

  // ---- Who owns what.
  const TensorOwner<Traits> owner(p, launch, blockIdx.x, threadIdx.x);
  const bool ends_only = kStateOnly && launch.checkpoints == nullptr;
  if constexpr (kStateOnly) let_next_launch_begin();
  if (!owner.exists) return;
  if (ends_only) {
    // Nobody asks how the last segment ends.
    if (owner.last || owner.segment + launch.parts >= launch.segments) return;
  }
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int part = owner.part;
  const int columns = owner.columns;
  const int64_t segment = owner.segment;
  const int64_t batch = owner.batch;
  const int64_t head = owner.head;
  int64_t start = kBack ? (launch.segments - 1 - segment) * launch.segment_steps : owner.start;
  const int64_t first_column = owner.first_column;
  const int64_t column = owner.column;
  const int64_t left_back = end_of_steps(p) - start;
  int steps = kBack ? static_cast<int>(min(left_back, launch.segment_steps)) : owner.steps;
  if (steps <= 0) {
    if (kBack && ends_only) {  // nothing lies there, and what flows in is none
      float* const to = owner.end_at(launch, segment);
#pragma unroll
      for (int n = 0; n < 2 * kOwnSixteens; ++n)
        *reinterpret_cast<float4*>(to + 128 * n) = make_float4(0, 0, 0, 0);
      *owner.decays_at(to) = make_float2(1, 1);
    }
    if (!kBack && !ends_only) copy_state<Traits>(p, owner);
    return;
  }
  const auto begins_with_sequence = [&](int64_t at) {
    return p.starts != nullptr && (starts_from(p.starts, at) & 1) != 0;
  };
  if (ends_only && p.starts != nullptr) {
    // Or how a part does after which a sequence starts before the whole segment's end.
    const int64_t parts_left = launch.parts - 1 - segment % launch.parts;
    const int64_t rest = parts_left * launch.segment_steps;
    if (kBack ? has_starts(p.starts, start - rest, rest)
              : has_starts(p.starts, start + steps, rest) ||
                    begins_with_sequence(start + steps + rest)) {
      return;
    }
    if constexpr (kBack) {
      steps = reached_steps(p.starts, start, steps);
    } else {
      // What comes before the segment's last start is forgotten at its end.
      const int forgotten = forgotten_steps(p.starts, start, steps) / kSteps * kSteps;
      start += forgotten;
      steps -= forgotten;
    }
  }
  const int chunks = (steps + kSteps - 1) / kSteps;
  // Chunks are counted in the order of the walk. Where in time does one lie?
  const auto place_in_time = [&](int chunk) { return kBack ? chunks - 1 - chunk : chunk; };

  // ---- Loading.
  uint32_t shared = shared_address(tensor_memory);
  keep(shared);
  const uint32_t ring_end = shared + launch.stages * kStageBytes;
  const uint32_t products = ring_end;
  constexpr int kThreads = Traits::kThreads;
  const int64_t load_from = start + place_in_time(0) * kSteps;
  using RowLoader =
      TileLoader<Element, typename Traits::RowTile, Traits::kRows, kSteps, kThreads, kBack>;
  const int64_t row_head = p.group == 1 ? head : head / p.group;
  RowLoader load_q(p.q, batch, load_from, row_head, 0, p.K);
  RowLoader load_k(p.k, batch, load_from, row_head, 0, p.K);
  TileLoader<Element, typename Traits::ColumnTile, Traits::kColumns, kSteps, kThreads, kBack>
      load_v(p.v, batch, load_from, head, first_column, p.V);
  TileLoader<Gate, typename Traits::GateTile, Traits::kColumns, kSteps, kThreads, kBack> load_gate(
      p.gate, batch, load_from, head, first_column, p.V);
  const bool one_gate = p.gate.stride[3] == 0;
  const auto start_loading = [&](int chunk, uint32_t stage) {
    const int left = steps - place_in_time(chunk) * kSteps;
    if (kBack ? chunk < chunks : left > 0) {
      if constexpr (!kStateOnly) load_q.start(stage, left);
      load_k.start(stage + kOfK, left);
      load_v.start(stage + kOfV, left);
      if (__builtin_expect(one_gate, 0)) {
        load_gate.spread(stage + kOfGate, left);
      } else {
        load_gate.start(stage + kOfGate, left);
      }
    }
    commit_copies();
  };
  for (int chunk = 0; chunk < launch.stages - 1; ++chunk) {
    start_loading(chunk, shared + chunk * kStageBytes);
  }
  // The stage after `stage`, which holds `chunk`; if there is no next chunk, the same.
  const auto next_stage = [&](int chunk, uint32_t stage) {
    const uint32_t next = stage + kStageBytes;
    const uint32_t around = next == ring_end ? shared : next;
    return chunk + 1 < chunks ? around : stage;
  };

  // ---- The state before the first step: of the initial state and the ends before the segment what
  // their decays leave.
  float state[2 * kOwnSixteens][4];
  int ends = 0;  // that count
  bool from_initial = !ends_only && p.initial_state.data != nullptr;
  if (!ends_only && segment > owner.first_segment && (kBack || !begins_with_sequence(start))) {
    const int all = static_cast<int>((segment - owner.first_segment) * launch.parts);
    const float* from = owner.end_at(launch, segment * launch.parts - 1);
    float through[2] = {1, 1};
    bool any = true;
    wait_for_last_launch();
    while (any && ends < all) {
      constexpr int kAtOnce = 8;
      float2 decays[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (ends + n < all) decays[n] = *owner.decays_at(from - n * owner.end_stride(launch));
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (!any || ends == all) break;
        through[0] *= decays[n].x;
        through[1] *= decays[n].y;
        any = __any_sync(~0u, through[0] != 0 || through[1] != 0);
        ++ends;
      }
      from -= kAtOnce * owner.end_stride(launch);
    }
    if (!any) from_initial = false;
  }
#pragma unroll
  for (int n = 0; n < 8 * kOwnSixteens; ++n) state[n / 4][n % 4] = 0;
  if (from_initial) {
#pragma unroll
    for (int n = 0; n < 2 * kOwnSixteens; ++n) {
      // The largest kernel has no registers for all loads at once.
      if (Traits::kRows > 128 && n % 8 == 0 && 8 * n >= p.K) break;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t row = owner.row_at(n, c);
        const int64_t at = owner.column_at(c);
        if (row < p.K && at < p.V)
          state[n][c] = *element_of<const float>(p.initial_state, batch, head, row, at);
      }
    }
  }
  if (ends > 0) {
    // A part of the state after the other, or else registers run out.
    constexpr int kAtOnce = kOwnSixteens < 4 ? 2 * kOwnSixteens : 8;
    constexpr int kUnrolled = Traits::kRows > 128 ? 1 : 4;
#pragma unroll
    for (int first = 0; first < 2 * kOwnSixteens; first += kAtOnce) {
      const float* from = owner.end_at(launch, segment * launch.parts - ends);
#pragma unroll kUnrolled
      for (int number = 0; number < ends; ++number) {
        const float2 decays = *owner.decays_at(from);
#pragma unroll
        for (int n = first; n < first + kAtOnce; ++n) {
          const float4 end = *reinterpret_cast<const float4*>(from + 128 * n);
          state[n][0] = fmaf(decays.x, state[n][0], end.x);
          state[n][1] = fmaf(decays.x, state[n][1], end.y);
          state[n][2] = fmaf(decays.y, state[n][2], end.z);
          state[n][3] = fmaf(decays.y, state[n][3], end.w);
        }
        from += owner.end_stride(launch);
      }
    }
  }
  float segment_decay[2] = {1, 1};
  // In a walk back a chunk's first gate scales all that goes beyond it. It may be tiny, and shall
  // not make values so before they are rounded: it counts as 1 in its chunk, and waits in `pending`
  // for the next one.
  float pending[2] = {1, 1};
  const auto take_first_gate = [&](uint32_t stage, int chunk) {
    const int64_t first = start + place_in_time(chunk) * kSteps;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      constexpr int kElements = 16 / sizeof(Gate);
      const int channel = columns * 16 + group + 8 * h;
      pending[h] = to_accum(
          load_shared<Gate>(stage + kOfGate + Traits::GateTile::offset(0, channel / kElements) +
                            channel % kElements * static_cast<int>(sizeof(Gate))));
      if (__builtin_expect(p.log_gate, 0)) pending[h] = expf(pending[h]);
      if (p.starts != nullptr && starts_from(p.starts, first) & 1) pending[h] = 0;
    }
  };

  const RowFragments<Traits> rows;
  const RowFragments<Traits> own_rows = rows.rows_from(part * kOwnSixteens);
  const ColumnFragments<Element, typename Traits::ColumnTile> value_fragments(columns * 16);
  const ColumnFragments<Gate, typename Traits::GateTile> gate_fragments(columns * 16);
  const LevelMasks<Element> masks(group, quad);

  const auto load_tile = [&](TimeTile<Traits>& tile, int u, uint32_t stage) {
    Operand<Gate> unused[4];
    int lane_now = lane;
    if (Traits::kRows > 128) keep(lane_now);
    const ColumnFragments<Element, typename Traits::ColumnTile> value_fragments(columns * 16,
                                                                                lane_now);
    const ColumnFragments<Gate, typename Traits::GateTile> gate_fragments(columns * 16, lane_now);
    gate_fragments.load(tile.gate, unused, stage + kOfGate + u * Traits::kGateTile);
    value_fragments.load(tile.value, tile.plain, stage + kOfV + u * Traits::kColumnTile);
  };
  // Gates as plain numbers, 1 past the end, 0 at a sequence's first step. `left`: steps of the walk
  // from the tile's first on.
  const auto finish_gates = [&](TimeTile<Traits>& tile, int left) {
    if (p.log_gate) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float& gate = tile.gate[n / 4][n / 2 % 2][n % 2];
        gate = expf(gate);
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float& gate = tile.gate[n / 4][n / 2 % 2][n % 2];
      gate = 4 * quad + n / 4 * 2 + n % 2 < left ? gate : 1.0f;
    }
    if (p.starts != nullptr && left > 0 && (!kBack || left <= steps)) {
      const uint32_t bits = starts_from(p.starts, start + steps - left) >> 4 * quad;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (bits >> (n / 4 * 2 + n % 2) & 1) tile.gate[n / 4][n / 2 % 2][n % 2] = 0;
      }
    }
  };
  // Both, of as many tiles from u on.
  const auto load_gates = [&](auto& tiles, int u, int chunk, uint32_t stage) {
    constexpr int kCount = sizeof(tiles) / sizeof(tiles[0]);
    const int left = steps - place_in_time(chunk) * kSteps - u * 16;
#pragma unroll
    for (int n = 0; n < kCount; ++n) load_tile(tiles[n], u + n, stage);
    if (__builtin_expect(p.log_gate || p.starts != nullptr || left < 16 * kCount, 0)) {
      // Most tiles of packed sequences have no start. (The largest kernel has no register to look.)
      bool plain = false;
      if constexpr (Traits::kRows <= 128) {
        plain = !p.log_gate && left >= 16 * kCount && (!kBack || left <= steps);
        if (plain) plain = starts_from(p.starts, start + steps - left) << (32 - 16 * kCount) == 0;
      }
      if (!plain) {
#pragma unroll
        for (int n = 0; n < kCount; ++n) finish_gates(tiles[n], left - 16 * n);
      }
    }
    if (kBack && u == 0 && quad == 0) tiles[0].gate[0][0][0] = tiles[0].gate[0][1][0] = 1;
#pragma unroll
    for (int n = 0; n < kCount; ++n) tiles[n].multiply_gates();
  };

  // Where a block of P lies. For pairs of warps block 2, the second tile's q with the first one's
  // k, is still of use when that of the chunk after the next comes: it goes in turn to its own
  // place and to that of block 1, which nobody needs.
  const auto products_at = [&](int chunk, int block) {
    const int place = kParts == 2 && block == 2 ? 2 - chunk / 2 % 2 : block;
    return products + (chunk % 2 * Traits::kProducts + place) * Traits::kProductBytes;
  };

  // P of a chunk, times scale: block m * kTiles + n is the m-th tile of q with the n-th of k. (Of
  // two tiles the first block beyond the diagonal is of no use, but its warp would wait anyway.)
  const auto multiply_q_k = [&](int chunk, uint32_t stage) {
    constexpr int kProducts = Traits::kProducts;
    constexpr int kShare = kProducts > Traits::kWarps ? kProducts / Traits::kWarps : 1;
    const int turn =
        kProducts < Traits::kWarps ? (warp - chunk * kProducts) & (Traits::kWarps - 1) : warp;
    if (kProducts < Traits::kWarps && turn >= kProducts) return;
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      const int block = turn * kShare + n;
      const uint32_t q_tile = stage + block / kTiles * Traits::kRowTile;
      const uint32_t k_tile = stage + kOfK + block % kTiles * Traits::kRowTile;
      float sum[2][4] = {};
      float other[2][4] = {};  // two chains, if registers allow: a product waits for the last one
      constexpr int kUnrolled = kSixteens > 8 ? 1 : kSixteens / 2;
#pragma unroll kUnrolled
      for (int kk = 0; kk < kSixteens; kk += 2) {
        Operand<Element> left[4];
        Operand<Element> right[4];
        rows.load_left(left, q_tile, kk);
        rows.load_right(right, k_tile, kk);
        multiply_16_add<Element>(sum[0], sum[1], left, right);
        rows.load_left(left, q_tile, kk + 1);
        rows.load_right(right, k_tile, kk + 1);
        if constexpr (Traits::kFloat || kSixteens > 8) {
          multiply_16_add<Element>(sum[0], sum[1], left, right);
        } else {
          multiply_16_add<Element>(other[0], other[1], left, right);
        }
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) sum[n / 4][n % 4] += other[n / 4][n % 4];
#pragma unroll
      for (int n = 0; n < 8; ++n) sum[n / 4][n % 4] *= launch.scale;
      if (kParts == 1 || block != 1) Products<Element>::store(products_at(chunk, block), sum);
    }
  };

  // The same with half a block to each of (at least) eight warps.
  const auto multiply_q_k_halves = [&](int chunk, uint32_t stage) {
    constexpr int kHalves = 2 * Traits::kProducts;
    const int turn =
        kHalves < Traits::kWarps ? (warp - chunk * kHalves) & (Traits::kWarps - 1) : warp;
    if (kHalves < Traits::kWarps && turn >= kHalves) return;
    const int block = turn / 2;
    int lane_now = lane;
    keep(lane_now);  // addresses are quickly made: registers are worth more
    const RowFragments<Traits> rows(lane_now);
    const uint32_t q_tile = stage + block / kTiles * Traits::kRowTile;
    const uint32_t k_tile = stage + kOfK + block % kTiles * Traits::kRowTile;
    float sum[2][4] = {};
    constexpr int kUnrolled = kSixteens > 8 ? 4 : kSixteens / 2;
#pragma unroll kUnrolled
    for (int kk = 0; kk < kSixteens; kk += 2) {
      Operand<Element> right[4];
      rows.load_eight(right, k_tile, turn % 2, kk);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Operand<Element> left[4];
        rows.load_left(left, q_tile, kk + n);
        float part[4] = {};
        multiply_16(Traits::kFloat ? part : sum[n], left, right[2 * n], right[2 * n + 1]);
        if constexpr (Traits::kFloat) {
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[n][c] += part[c];
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[0][c] = (sum[0][c] + sum[1][c]) * launch.scale;
    if (kTiles == 1 || block != 1)
      Products<Element>::store_half(products_at(chunk, block), turn % 2, sum[0]);
  };

  const auto make_products = [&](int chunk, uint32_t stage) {
    if constexpr (Traits::kWarps >= 2 * Traits::kProducts && (kParts == 2 || kSixteens > 8)) {
      multiply_q_k_halves(chunk, stage);
    } else {
      multiply_q_k(chunk, stage);
    }
  };

  // Rows 16 m ... 16 m + 15 of P as wgmma leaves them.
  const auto store_products = [&](float (&sum)[2 * kTiles][4], int chunk, int m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float block[2][4];
#pragma unroll
      for (int c = 0; c < 8; ++c) block[c / 4][c % 4] = launch.scale * sum[2 * n + c / 4][c % 4];
      Products<Element>::store(
          products + (chunk % 2 * Traits::kProducts + m * kTiles + n) * Traits::kProductBytes,
          block);
    }
  };

  constexpr int kYElements = 16 / sizeof(Element);     // of y in a chunk of 16 bytes
  constexpr int kYChunks = 16 * sizeof(Element) / 16;  // in a warp's columns
  // Neighbouring lanes read rows of different banks.
  const int y_step = kYChunks == 2 ? lane / 2 % 4 * 4 + lane / 8 : lane / kYChunks;
  const int64_t y_column = column + lane % kYChunks * kYElements;
  const int y_steps = y_column < p.V ? steps : 0;
  Element* y_out = element_of<Element>(p.y, batch, start + y_step, head, y_column);

  // 16 kk rows on, in the units of a wgmma matrix.
  const auto rows_on = [](int kk) {
    return (kk % 4 * 32 + kk / 4 * Traits::RowTile::kPanelBytes) / 16;
  };

  // ---- The state on mma.
  const auto multiply_q_state = [&](float (&y)[2 * kTiles][4], float (&state)[2 * kOwnSixteens][4],
                                    uint32_t q_tile) {
#pragma unroll
    for (int n = 0; n < 8 * kTiles; ++n) y[n / 4][n % 4] = 0;
    constexpr bool kTwoChains = kOwnSixteens > 8;  // a product waits for the last one
    float other[kTwoChains ? 2 * kTiles : 1][4] = {};
#pragma unroll
    for (int kk = 0; kk < kOwnSixteens; ++kk) {
      Operand<Element> left[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        left[n] = make_operand<Element>(state[2 * kk + n / 2][n % 2 * 2],
                                        state[2 * kk + n / 2][n % 2 * 2 + 1]);
      }
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        Operand<Element> right[4];
        own_rows.load_right(right, q_tile + (u ^ part) * Traits::kRowTile, kk);
        if (kTwoChains && kk % 2 == 1) {
          multiply_16_add<Element>(other[2 * u], other[2 * u + 1], left, right);
        } else {
          multiply_16_add<Element>(y[2 * u], y[2 * u + 1], left, right);
        }
      }
    }
    if constexpr (kTwoChains) {
#pragma unroll
      for (int n = 0; n < 8 * kTiles; ++n) y[n / 4][n % 4] += other[n / 4][n % 4];
    }
  };
  const auto advance_state = [&](float (&state)[2 * kSixteens][4], const ChunkPlan<Traits>& plan,
                                 uint32_t k_tile) {
#pragma unroll
    for (int kk = 0; kk < kSixteens; ++kk) {
      float added[2][4] = {};
#pragma unroll
      for (int n = 0; n < 8; ++n) state[2 * kk + n / 4][n % 4] *= plan.decay[n / 2 % 2];
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        Operand<Element> values[4];
        plan.carried(values, u);
        Operand<Element> right[4];
        rows.load_transposed(right, k_tile + u * Traits::kRowTile, kk);
        multiply_16(Traits::kFloat ? added[0] : state[2 * kk], values, right[0], right[1]);
        multiply_16(Traits::kFloat ? added[1] : state[2 * kk + 1], values, right[2], right[3]);
      }
      if constexpr (Traits::kFloat) {
#pragma unroll
        for (int n = 0; n < 8; ++n) state[2 * kk + n / 4][n % 4] += added[n / 4][n % 4];
      }
    }
  };

  // Leaves the state before a chunk behind where one is due.
  Element* first_checkpoint = nullptr;
  if (kWalk != Walk::kOutputs && launch.checkpoints != nullptr && column < p.V)
    first_checkpoint =
        Checkpoints<Element>(p).at(static_cast<Element*>(launch.checkpoints), owner.pair,
                                   start / kCheckpointSteps, column / 16);
  const auto store_checkpoint = [&](int chunk) {
    const int place = place_in_time(chunk);
    const int border = kBack ? place + 1 : place;
    const bool due = border * kSteps % kCheckpointSteps == 0 || (kBack && chunk == 0);
    if (first_checkpoint == nullptr || !due) return;
    const Checkpoints<Element> checkpoints(p);
    Element* to = first_checkpoint +
                  static_cast<int64_t>(place * kSteps / kCheckpointSteps) * checkpoints.elements();
#pragma unroll
    for (int kk = 0; kk < kOwnSixteens; ++kk) {
      const int block = part * kOwnSixteens + kk;
      float out[2][4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        out[n / 4][n % 4] = state[2 * kk + n / 4][n % 4] * (kBack ? pending[n / 2 % 2] : 1.0f);
      }
      if (block < checkpoints.row_blocks)
        checkpoints.store(to + block * checkpoints.kBlock, out[0], out[1]);
    }
  };

  // From shared to global memory, what every warp has stored of its columns.
  const auto copy_out = [&](int chunk, uint32_t y_tile) {
    __syncwarp();
    constexpr int kStepsAtOnce = 32 / kYChunks;
#pragma unroll
    for (int n = 0; n < kSteps; n += kStepsAtOnce) {
      const int step = n + y_step;
      const uint32_t from =
          y_tile + Traits::ColumnTile::offset(slot_of(step), warp * kYChunks + lane % kYChunks);
      const uint4 bytes = load_shared<uint4>(from);
      if (chunk * kSteps + step < y_steps)
        *reinterpret_cast<uint4*>(y_out + n * p.y.stride[1]) = bytes;
    }
    y_out += kSteps * p.y.stride[1];
  };

  uint32_t stage = shared;
  if constexpr (kParts == 1) {
    // ---- The first chunk's plan.
    ChunkPlan<Traits> plan;
    {
      wait_for_all_but(launch.stages - 3);
      if constexpr (kWgmma) fence_for_wgmma();
      __syncthreads();
      if constexpr (!kStateOnly) {
        make_products(0, stage);
        make_products(1, next_stage(0, stage));
        __syncthreads();
      }
      TimeTile<Traits> tile[1];
      load_gates(tile, 0, 0, stage);
      plan.template take<kWalk, 0>(tile[0], launch.scale, products, masks);
      if constexpr (kTiles == 2) {
        load_gates(tile, 1, 0, stage);
        plan.template take<kWalk, 1>(tile[0], launch.scale, products, masks);
      }
    }

    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t next = next_stage(chunk, stage);
      const uint32_t after_next = next_stage(chunk + 1, next);
      if constexpr (kWalk != Walk::kOutputs) store_checkpoint(chunk);
      if constexpr (kBack) {
#pragma unroll
        for (int h = 0; h < 2; ++h) plan.decay[h] *= pending[h];
        take_first_gate(stage, chunk);
      }
      TimeTile<Traits> tiles[Traits::kEarly ? kTiles : 1];
      if constexpr (Traits::kEarly) load_gates(tiles, 0, chunk + 1, next);

      // ---- What the state before the chunk gives to each step; the state after it.
      float y[2 * kTiles][4];
      float p_rows[kAllWgmma ? 2 * kTiles : 1][4];      // of wgmma: 16 rows a warp
      constexpr int kLeft = kAllWgmma ? kSixteens : 8;  // operands at once
      uint32_t left[kWgmma ? kLeft : 1][4];
      uint32_t carried[kTiles][4];
      constexpr int kGroups = (Traits::kWarps + 3) / 4;
      const bool makes_p = kGroups == 1 || warp / 4 == chunk % kGroups;
      if constexpr (kWgmma) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          Operand<Element> values[4];
          plan.carried(values, u);
#pragma unroll
          for (int n = 0; n < 4; ++n) carried[u][n] = values[n].bits;
        }
        const uint64_t q_now = wgmma_matrix(stage, 0);
        const uint64_t k_now = wgmma_matrix(stage + kOfK, Traits::RowTile::kPanelBytes);
        if constexpr (!kStateOnly && !kAllWgmma) {
          // Four operands after the other: two fours are there at a time.
#pragma unroll
          for (int kk = 0; kk < kSixteens; ++kk) {
            uint32_t (&now)[4] = left[kk % kLeft];
            if (kk >= kLeft && kk % 4 == 0) {
              wgmma_wait<1>();
#pragma unroll
              for (int n = 0; n < 4; ++n) wgmma_hold(left[(kk + n) % kLeft]);
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              now[n] = make_operand<Element>(state[2 * kk + n / 2][n % 2 * 2],
                                             state[2 * kk + n / 2][n % 2 * 2 + 1])
                           .bits;
            }
            if (kk % 4 < 3) continue;
#pragma unroll
            for (int n = 3; n >= 0; --n) wgmma_hold(left[(kk - n) % kLeft]);
            wgmma_fence();
#pragma unroll
            for (int n = 3; n >= 0; --n) {
              wgmma_64x16<Element, false>(y, left[(kk - n) % kLeft], q_now + rows_on(kk - n),
                                          kk - n > 0);
            }
            wgmma_commit();
          }
        }
        if constexpr (!kStateOnly && kAllWgmma) {
#pragma unroll
          for (int n = 0; n < 4 * kSixteens; ++n) {
            left[n / 4][n % 4] =
                make_operand<Element>(state[n / 2][n % 2 * 2], state[n / 2][n % 2 * 2 + 1]).bits;
          }
        }
#pragma unroll
        for (int n = 0; n < 8 * kSixteens; ++n) state[n / 4][n % 4] *= plan.decay[n / 2 % 2];
#pragma unroll
        for (int n = 0; n < 2 * kSixteens; ++n) wgmma_hold(state[n]);
#pragma unroll
        for (int u = 0; u < kTiles; ++u) wgmma_hold(carried[u]);
        if constexpr (!kStateOnly && kAllWgmma) {
#pragma unroll
          for (int kk = 0; kk < kSixteens; ++kk) wgmma_hold(left[kk]);
        }
        wgmma_fence();
        if constexpr (!kStateOnly && kAllWgmma) {
#pragma unroll
          for (int kk = 0; kk < kSixteens; ++kk) {
            wgmma_64x16<Element, false>(y, left[kk], q_now + rows_on(kk), kk > 0);
          }
          wgmma_commit();
        }
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          const uint64_t k_tile = k_now + u * Traits::kRowTile / 16;
          if constexpr (kSixteens <= 8) {
            wgmma_64x16<Element, true>(state, carried[u], k_tile, 1);
          } else {
            using Half = float (&)[16][4];
            wgmma_64x16<Element, true>(reinterpret_cast<Half>(state[0]), carried[u], k_tile, 1);
            wgmma_64x16<Element, true>(reinterpret_cast<Half>(state[16]), carried[u],
                                       k_tile + rows_on(8), 1);
          }
        }
        wgmma_commit();
      } else {
        if constexpr (!kStateOnly) multiply_q_state(y, state, stage);
        advance_state(state, plan, stage + kOfK);
      }

      // ---- The chunk after the next has come, every warp has left the last one, and P of the next
      // one is complete.
      wait_for_all_but(launch.stages - 4);
      if constexpr (kWgmma) fence_for_wgmma();
      __syncthreads();
      if constexpr (kWgmma && !kAllWgmma && !kStateOnly) {
        wgmma_wait<1>();
#pragma unroll
        for (int n = 0; n < kLeft; ++n) wgmma_hold(left[n]);
#pragma unroll
        for (int n = 0; n < 2 * kTiles; ++n) wgmma_hold(y[n]);
      }
      start_loading(chunk + launch.stages - 1, (stage == shared ? ring_end : stage) - kStageBytes);
      if constexpr (!Traits::kEarly) load_gates(tiles, 0, chunk + 1, next);

      // ---- P of the chunk after the next.
      if constexpr (kAllWgmma && !kStateOnly) {
        // wgmma takes 64 rows of q, a chunk has 32: the others are whatever follows in memory, and
        // warps 2 and 3, whose results they are, don't store them.
        if (makes_p) {
          const uint64_t q_later = wgmma_matrix(after_next, 0);
          const uint64_t k_later = wgmma_matrix(after_next + kOfK, 0);
          wgmma_fence();
#pragma unroll
          for (int kk = 0; kk < kSixteens; ++kk) {
            wgmma_64x16<Element>(p_rows, q_later + rows_on(kk), k_later + rows_on(kk), kk > 0);
          }
        }
        wgmma_commit();
      } else if constexpr (!kStateOnly) {
        make_products(chunk + 2, after_next);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) segment_decay[h] *= plan.decay[h];

      // ---- The next chunk's plan.
      ChunkPlan<Traits> next_plan;
      const uint32_t next_products = products + (chunk + 1) % 2 * Traits::kOtherBytes / 2;
      next_plan.template take<kWalk, 0>(tiles[0], launch.scale, next_products, masks);

      // ---- Outputs, by way of v's place in shared memory, where only this warp reads.
      if constexpr (!kStateOnly) {
        if constexpr (kAllWgmma) {
          wgmma_wait<2>();
#pragma unroll
          for (int kk = 0; kk < kSixteens; ++kk) wgmma_hold(left[kk]);
#pragma unroll
          for (int n = 0; n < 2 * kTiles; ++n) wgmma_hold(y[n]);
        }
        const uint32_t y_tile = stage + kOfV;
        __syncwarp();
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          float out[2][4];
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            out[n / 4][n % 4] = fmaf(plan.factor[u][n / 4][n % 4], y[2 * u + n / 4][n % 4],
                                     plan.inside[u][n / 4][n % 4]);
          }
          value_fragments.store(out, y_tile + u * Traits::kColumnTile);
        }
        if constexpr (!Traits::kEarly) copy_out(chunk, y_tile);
      }

      if constexpr (kTiles == 2) {
        if constexpr (!Traits::kEarly) load_gates(tiles, 1, chunk + 1, next);
        next_plan.template take<kWalk, 1>(tiles[Traits::kEarly ? 1 : 0], launch.scale,
                                          next_products, masks);
      }
      if constexpr (!kStateOnly && Traits::kEarly) copy_out(chunk, stage + kOfV);
      if constexpr (kWgmma) {
        wgmma_wait<0>();
#pragma unroll
        for (int u = 0; u < kTiles; ++u) wgmma_hold(carried[u]);
#pragma unroll
        for (int n = 0; n < 2 * kSixteens; ++n) wgmma_hold(state[n]);
        if constexpr (!kStateOnly && kAllWgmma) {
#pragma unroll
          for (int n = 0; n < 2 * kTiles; ++n) wgmma_hold(p_rows[n]);
          if (makes_p && warp % 4 < 2) store_products(p_rows, chunk + 2, warp % 4);
        }
      }
      plan = next_plan;
      stage = next;
    }
  } else {
    // ---- What the warps of a pair tell each other.
    constexpr uint32_t kOfY = kOfGate;  // outputs on their way
    constexpr uint32_t kFlip = 32;
    const uint32_t sums = products + 2 * Traits::kProducts * Traits::kProductBytes;
    const uint32_t decays = sums + 2 * Traits::kSumsBytes;
    // Of a chunk's tile u; the second half at the address ^ kFlip.
    const auto values_at = [&](int u, uint32_t stage) {
      return stage + kOfV + u * Traits::kColumnTile +
             Traits::ColumnTile::offset(lane / 2, 4 * columns + lane % 2);
    };
    const auto decay_at = [&](int u, int chunk) {
      return decays + chunk % 2 * Traits::kDecaysBytes + (u * Traits::kGroups + columns) * 64 +
             group * 8;
    };
    // What the state's part u gives to the other part's tile; the second half 512 bytes on.
    const auto sums_at = [&](int u, int chunk) {
      return sums + chunk % 2 * Traits::kSumsBytes + (u * Traits::kGroups + columns) * 1024 +
             lane * 16;
    };

    const auto pack = [](Operand<Element>(&to)[4], const float (&value)[2][4]) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        to[n] = make_operand<Element>(value[n / 2][n % 2 * 2], value[n / 2][n % 2 * 2 + 1]);
      }
    };
    // Takes the state's part past both tiles of a chunk; `value` has what each carries to its end,
    // `first` and `second` their decays. float32 sums join the state outside the tensor core.
    const auto advance_part = [&](float (&value)[2][2][4], const float (&first)[2],
                                  const float (&second)[2], uint32_t k_tile) {
      Operand<Element> left[2][4];
      pack(left[0], value[0]);
      pack(left[1], value[1]);
#pragma unroll
      for (int kk = 0; kk < kOwnSixteens; ++kk) {
        float added[2][2][4] = {};
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          Operand<Element> right[4];
          own_rows.load_transposed(right, k_tile + u * Traits::kRowTile, kk);
          multiply_16(added[u][0], left[u], right[0], right[1]);
          multiply_16(added[u][1], left[u], right[2], right[3]);
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int h = n / 2 % 2;
          float& element = state[2 * kk + n / 4][n % 4];
          const float far = added[kBack ? 1 : 0][n / 4][n % 4];
          const float near = added[kBack ? 0 : 1][n / 4][n % 4];
          element =
              fmaf(first[h] * second[h], element, fmaf(kBack ? first[h] : second[h], far, near));
        }
      }
    };
    TilePlan<Traits> plan;
    const auto make_plan = [&](TimeTile<Traits>& tile, int chunk) {
      Products<Element> within;
      if constexpr (!kStateOnly) within.load(products_at(chunk, 3 * part));
      if constexpr (kBack) {
        const float scale[2] = {launch.scale, launch.scale};
        tile.carry_back(scale);
      } else {
        tile.template scan<!kStateOnly>(within, masks);
      }
      const float through[2] = {1, 1};
      const float nothing[2][4] = {};
      if constexpr (!kStateOnly) tile.finish(through, true, nothing, plan.factor, plan.inside);
    };
    const auto send_plan = [&](const TimeTile<Traits>& tile, int chunk, uint32_t stage) {
      const auto& value = tile.value;
      const uint32_t to = values_at(part, stage);
      if (chunk >= chunks) return;
      store_shared(to, make_float4(value[0][0][0], value[0][0][1], value[0][1][0], value[0][1][1]));
      store_shared(to ^ kFlip,
                   make_float4(value[1][0][0], value[1][0][1], value[1][1][0], value[1][1][1]));
      if (quad == 0) store_shared(decay_at(part, chunk), make_float2(tile.decay[0], tile.decay[1]));
    };
    const auto send_sums = [&](const float (&a)[4], const float (&b)[4], int chunk) {
      const uint32_t to = sums_at(part, chunk);
      store_shared(to, make_float4(a[0], a[1], a[2], a[3]));
      store_shared(to + 512, make_float4(b[0], b[1], b[2], b[3]));
    };

    // Outputs of the chunk before: y = factor * (the other part's sum) + sum. They leave by way of
    // a place in shared memory from which only this warp has read.
    float factor[2][4] = {};
    float sum[2][4] = {};
    const auto finish_outputs = [&](int chunk, uint32_t stage) {
      float y[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float4 other = load_shared<float4>(sums_at(1 - part, chunk + 1) + s * 512);
        y[s][0] = fmaf(factor[s][0], other.x, sum[s][0]);
        y[s][1] = fmaf(factor[s][1], other.y, sum[s][1]);
        y[s][2] = fmaf(factor[s][2], other.z, sum[s][2]);
        y[s][3] = fmaf(factor[s][3], other.w, sum[s][3]);
      }
      value_fragments.store(y, stage + kOfY + part * Traits::kColumnTile);
    };
    const auto copy_outputs = [&](int chunk, uint32_t stage) {
      __syncwarp();
      constexpr int kStepsAtOnce = 32 / kYChunks;
#pragma unroll
      for (int n = 0; n < 16; n += kStepsAtOnce) {
        const int step = (chunk - 1) * kSteps + part * 16 + n + y_step;
        const uint4 bytes = load_shared<uint4>(
            stage + kOfY + part * Traits::kColumnTile +
            Traits::ColumnTile::offset(slot_of(n + y_step), columns * kYChunks + lane % kYChunks));
        if (step >= 0 && step < y_steps)
          *reinterpret_cast<uint4*>(y_out + n * p.y.stride[1]) = bytes;
      }
      y_out += kSteps * p.y.stride[1];
    };
    y_out += (part * 16 - kSteps) * p.y.stride[1];

    // ---- The first chunk's plan. No chunk comes before it.
    {
      wait_for_all_but(launch.stages - 3);
      __syncthreads();
      TimeTile<Traits> tile[1];
      load_gates(tile, part, 0, stage);
      if constexpr (!kStateOnly) {
#pragma unroll 1
        for (int n = 0; n < 2; ++n) make_products(n, n == 0 ? stage : next_stage(0, stage));
        send_sums(sum[0], sum[1], 1);
      }
      __syncthreads();
      make_plan(tile[0], 0);
      send_plan(tile[0], 0, stage);
    }

    for (int chunk = 0;; ++chunk) {
      const uint32_t next = next_stage(chunk, stage);
      const uint32_t after_next = next_stage(chunk + 1, next);
      TimeTile<Traits> tile[1];
      __syncwarp();
      load_gates(tile, part, chunk + 1, next);

      // ---- The chunk after the next has come, every warp has left the last one, the next one's P
      // and what the last turn had to tell is complete.
      wait_for_all_but(launch.stages - 4);
      __syncthreads();
      if constexpr (!kStateOnly) finish_outputs(chunk, stage);
      if (chunk == chunks) break;
      if constexpr (kWalk != Walk::kOutputs) store_checkpoint(chunk);

      // ---- What the state's part gives to each step of both tiles, first to those of its own.
      float y[4][4];
      if constexpr (!kStateOnly) multiply_q_state(y, state, stage);
      float value[2][2][4];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const float4 four = load_shared<float4>(values_at(u, stage) ^ (s * kFlip));
          value[u][s][0] = four.x;
          value[u][s][1] = four.y;
          value[u][s][2] = four.z;
          value[u][s][3] = four.w;
        }
      }
      const float2 first_decay = load_shared<float2>(decay_at(0, chunk));
      const float2 second_decay = load_shared<float2>(decay_at(1, chunk));
      const float first[2] = {first_decay.x, first_decay.y};
      float second[2] = {second_decay.x, second_decay.y};
      if constexpr (kBack) {
        second[0] *= pending[0];
        second[1] *= pending[1];
        take_first_gate(stage, chunk);
      }

      if constexpr (!kStateOnly) {
        // To the second tile also the first one's values.
        Operand<Element> left[4];
        pack(left, value[0]);
        Products<Element> across;
        across.load(products_at(chunk, 2));
        float from_first[2][4] = {};
        multiply_16(from_first[0], left, across.at[0], across.at[2]);
        multiply_16(from_first[1], left, across.at[1], across.at[3]);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int s = n / 4;
          const int c = n % 4;
          const float before = part == 0 ? 0.0f : from_first[s][c];
          const float through = part == 0 ? launch.scale : launch.scale * first[c / 2];
          factor[s][c] = plan.factor[s][c] * through;
          sum[s][c] =
              fmaf(factor[s][c], y[s][c], fmaf(plan.factor[s][c], before, plan.inside[s][c]));
        }
      }

      // ---- The state's part after the chunk.
      if constexpr (!kStateOnly) send_sums(y[2], y[3], chunk);
      advance_part(value, first, second, stage + kOfK);
#pragma unroll
      for (int h = 0; h < 2; ++h) segment_decay[h] *= first[h] * second[h];

      // ---- The next chunk's plan, and P of the one after it.
      start_loading(chunk + launch.stages - 1, (stage == shared ? ring_end : stage) - kStageBytes);
      if constexpr (!kStateOnly) copy_outputs(chunk, stage);
      make_plan(tile[0], chunk + 1);
      if constexpr (!kStateOnly) make_products(chunk + 2, after_next);
      send_plan(tile[0], chunk + 1, next);
      stage = next;
    }
    if constexpr (!kStateOnly) copy_outputs(chunks, stage);
  }

  if constexpr (kBack) {
#pragma unroll
    for (int n = 0; n < 8 * kOwnSixteens; ++n) state[n / 4][n % 4] *= pending[n / 2 % 2];
#pragma unroll
    for (int h = 0; h < 2; ++h) segment_decay[h] *= pending[h];
  }

  // ---- The state after the last step. Where it goes is computed anew: registers are scarce.
  uint32_t block = blockIdx.x;
  uint32_t thread = threadIdx.x;
  keep(block);
  keep(thread);
  const TensorOwner<Traits> end(p, launch, block, thread);
  if (ends_only) {
    float* const to = end.end_at(launch, end.segment);
#pragma unroll
    for (int n = 0; n < 2 * kOwnSixteens; ++n)
      *reinterpret_cast<float4*>(to + 128 * n) =
          make_float4(state[n][0], state[n][1], state[n][2], state[n][3]);
    *end.decays_at(to) = make_float2(segment_decay[0], segment_decay[1]);
    return;
  }
  if (!end.last || p.final_state.data == nullptr) return;
#pragma unroll
  for (int n = 0; n < 2 * kOwnSixteens; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t row = end.row_at(n, c);
      const int64_t at = end.column_at(c);
      if (row < p.K && at < p.V)
        *element_of<float>(p.final_state, end.batch, end.head, row, at) = state[n][c];
    }
  }
}

template <class Traits, Walk kWalk>
__global__ void __launch_bounds__(Traits::kThreads, Traits::blocks(kWalk))
    tensor_forward(const __grid_constant__ Params p, const __grid_constant__ TensorLaunch launch) {
  constexpr int kLeastBytes = kFewestStages * Traits::stage_bytes(kWalk) + Traits::kOtherBytes;
  if constexpr (kLeastBytes <= kMostSharedBytes) {
    tensor_block<Traits, kWalk>(p, launch);
    wait_for_last_launch();  // so that what follows this launch follows that one too
  } else {
    __trap();
  }
}

// ===================================== SIMT backward ==========================================
//
// S and R are recurrences on every element (i, j) alone, forward and backward in time; only the
// gradients mix elements. dv and dgate sum over rows, dq and dk over columns. So there are two
// kinds of blocks: one owns columns and sums over all rows, the other owns rows and sums over all
// columns. Each computes S and R of its own elements; nothing is added up across blocks.
//
// Time is cut in sweeps, a block each, all in parallel. Within a sweep lanes own kSteps steps, and
// a scan in shared memory joins them, S from the front and F from the back. If there are several
// sweeps, simt_summarize_sweeps writes what each does to a state and to a flow, and chain_sweeps
// chains these.

// What all backward kernels read: operands in the order of their use, then the outputs.
template <typename Index>
struct BackwardArguments {
  View<Index> k, v, gate, q, dy;
  Index T = 0, H = 0, K = 0, V = 0;
  Index group = 1;  // heads that share one head of q and k
  bool log_gate = false;
  bool packed = false;                 // operands move in packs along the last axis
  Dtype dtype = Dtype::kFloat32;       // of q, k, v, dy, dq, dk, dv
  Dtype gate_dtype = Dtype::kFloat32;  // dtype, or float32 beside half-precision q, k, v
  double scale = 1.0;
  View<Index> initial_state, dfinal_state;
  View<Index> dv, dgate, dq, dk, dinitial_state;
  Index sequences = 0;  // packed, as in Arguments
  const int64_t* borders = nullptr;
  const uint32_t* starts = nullptr;
  const int64_t* end = nullptr;
};

// A launch of one kind of block: which part of the summed axis it covers, and where sweeps lie.
struct BackwardLaunch {
  Slice slice;
  int64_t sweeps = 1;  // of packed sequences: slots of pieces
  int64_t sweep_steps = 0;
  int shift = 0;             // of those pieces
  int64_t batch = 0;         // at which this grid begins
  int64_t tile = 0;          // likewise, of the owned axis
  void* states = nullptr;    // (B, H, sweeps, K, V): what precedes each sweep
  void* flows = nullptr;     // (B, H, sweeps, K, V): what flows back into each sweep's last state
  void* decays = nullptr;    // (B, H, sweeps, V): products of gates
  View<int64_t> partial[4];  // sums so far of the block's two outputs; of the other kind's
  int64_t row = 0;           // of the whole problem, at which this part's rows begin
  int64_t column = 0;
  int64_t all_rows = 0;  // the whole problem's K and V
  int64_t all_columns = 0;
};

enum class Own { kColumns, kRows };

constexpr int kBackwardWarps = 8;  // of a block, at most

// Small: float32, operands and outputs move in packs, 32-bit indices, all time in one sweep, the
// summed axis in one slice. Kernels that aren't small branch on the dtypes of float operands.
template <typename Accum_, Own kOwn_, bool kSmall_, int kSumGroups_, int kSummed_, int kTimeGroups_,
          int kOwned_, int kSteps_>
struct BackwardTraits {
  using Accum = Accum_;
  static constexpr Own kOwn = kOwn_;
  static constexpr bool kSmall = kSmall_;
  using Index = std::conditional_t<kSmall, int32_t, int64_t>;
  static constexpr int kSumGroups = kSumGroups_;  // lanes over the axis that is summed
  static constexpr int kSummed = kSummed_;        // a lane's share of that axis
  static constexpr int kTimeGroups = kTimeGroups_;
  static constexpr int kOwnGroups = 32 / (kSumGroups * kTimeGroups);
  static constexpr int kOwned = kOwned_;  // a lane's share of the axis that the block owns
  static constexpr int kSteps = kSteps_;
  static constexpr int kTileOwned = kOwnGroups * kOwned;
  static constexpr int kStateLanes = kSumGroups * kOwnGroups;
  static constexpr bool kColumns = kOwn == Own::kColumns;
  static constexpr int kRowCount = kColumns ? kSummed : kOwned;     // a lane's rows
  static constexpr int kColumnCount = kColumns ? kOwned : kSummed;  // a lane's columns
  static constexpr int kElements = kSummed * kOwned;
  // A lane's words in shared memory; odd, so that the time groups of a warp meet different banks.
  static constexpr int kWords = (2 * kElements + kColumnCount) | 1;
  static constexpr int kValues = kSteps * kOwned;  // of each output, before the sum over lanes
  static constexpr int kOutputs = kValues > kSumGroups ? kValues / kSumGroups : 1;
  static constexpr int kSharers = kSumGroups * kOutputs / kValues;  // lanes with the same outputs
  static_assert(kSumGroups * kTimeGroups * kOwnGroups == 32, "lanes fill a warp");
};

// The 16 bits of a half-precision number as a float.
__device__ __forceinline__ float from_bits(uint16_t bits, bool bfloat) {
  const __half_raw half{bits};
  return bfloat ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__half(half));
}

// Element at an offset of an operand of the given dtype, as a number of the state's type.
template <typename Accum>
__device__ __forceinline__ Accum read_number(const void* data, int64_t offset, Dtype dtype) {
  if constexpr (sizeof(Accum) > 4) return static_cast<const double*>(data)[offset];
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(data)[offset];
  return from_bits(static_cast<const uint16_t*>(data)[offset], dtype == Dtype::kBFloat16);
}

template <typename Accum>
__device__ __forceinline__ void write_number(void* data, int64_t offset, Dtype dtype,
                                             Accum number) {
  if constexpr (sizeof(Accum) > 4) {
    static_cast<double*>(data)[offset] = number;
  } else if (dtype == Dtype::kFloat32) {
    static_cast<float*>(data)[offset] = number;
  } else if (dtype == Dtype::kFloat16) {
    static_cast<__half*>(data)[offset] = __float2half_rn(number);
  } else {
    static_cast<__nv_bfloat16*>(data)[offset] = __float2bfloat16_rn(number);
  }
}

template <typename Index>
__device__ __forceinline__ int64_t offset_of(const View<Index>& view, Index a, Index b, Index c,
                                             Index d) {
  return static_cast<int64_t>(a) * view.stride[0] + static_cast<int64_t>(b) * view.stride[1] +
         static_cast<int64_t>(c) * view.stride[2] + static_cast<int64_t>(d) * view.stride[3];
}

// What memory holds as a number; half-precision numbers come as bits.
__device__ __forceinline__ float number_of(float x, bool) {
  return x;
}
__device__ __forceinline__ double number_of(double x, bool) {
  return x;
}
__device__ __forceinline__ float number_of(uint16_t bits, bool bfloat) {
  return from_bits(bits, bfloat);
}

// kCount elements at kSteps steps along one operand's last axis, dealt to `groups` lanes in packs.
// What lies outside the problem reads as zero. kWhole: nothing does.
template <bool kWhole, typename Source, int kSteps, int kCount, typename Accum, typename Index>
__device__ __forceinline__ void load_packs(Accum (&out)[kSteps][kCount], const View<Index>& view,
                                           const Source* first, int group, int groups, int steps,
                                           int count, bool bfloat) {
  constexpr int kPack = largest_pack(kCount, sizeof(Accum));
#pragma unroll
  for (int c = 0; c < kSteps; ++c) {
    const Source* step = first + static_cast<int64_t>(c) * view.stride[1];
#pragma unroll
    for (int n = 0; n < kCount; n += kPack) {
      const int index = (n / kPack * groups + group) * kPack;
      Pack<Source, kPack> pack = {};
      if (kWhole || (c < steps && index < count))
        pack = *reinterpret_cast<const Pack<Source, kPack>*>(step + index);
#pragma unroll
      for (int e = 0; e < kPack; ++e) out[c][n + e] = number_of(pack.at[e], bfloat);
    }
  }
}

// Likewise with any strides.
template <typename Source, int kSteps, int kCount, typename Accum>
__device__ __forceinline__ void load_each(Accum (&out)[kSteps][kCount], const View<int64_t>& view,
                                          const Source* first, int group, int groups, int steps,
                                          int count, bool bfloat) {
  constexpr int kPack = largest_pack(kCount, sizeof(Accum));
#pragma unroll
  for (int c = 0; c < kSteps; ++c) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int index = (n / kPack * groups + group) * kPack + n % kPack;
      Source source = 0;
      if (c < steps && index < count) source = first[c * view.stride[1] + index * view.stride[3]];
      out[c][n] = number_of(source, bfloat);
    }
  }
}

// Likewise for an operand of any dtype, from its element `offset` on.
template <int kSteps, int kCount, typename Accum>
__device__ __forceinline__ void load_axis(Accum (&out)[kSteps][kCount], const View<int64_t>& view,
                                          Dtype dtype, int64_t offset, int group, int groups,
                                          int steps, int64_t limit, bool packed) {
  const int count = static_cast<int>(min(max(limit, int64_t{0}), int64_t{INT32_MAX}));
  const auto load = [&](const auto* data, bool bfloat) {
    if (packed) {
      load_packs<false>(out, view, data + offset, group, groups, steps, count, bfloat);
    } else {
      load_each(out, view, data + offset, group, groups, steps, count, bfloat);
    }
  };
  if constexpr (sizeof(Accum) > 4) {
    load(static_cast<const double*>(view.data), false);
  } else if (dtype == Dtype::kFloat32) {
    load(static_cast<const float*>(view.data), false);
  } else {
    load(static_cast<const uint16_t*>(view.data), dtype == Dtype::kBFloat16);
  }
}

// A lane's part of a sweep: its place, its operands, and the scan over the sweep's other lanes.
template <class Traits>
struct BackwardLane {
  using Accum = typename Traits::Accum;
  using Index = typename Traits::Index;
  using Arguments = BackwardArguments<Index>;
  static constexpr int kSteps = Traits::kSteps;
  static constexpr int kSummed = Traits::kSummed;
  static constexpr int kOwned = Traits::kOwned;
  static constexpr int kRowCount = Traits::kRowCount;
  static constexpr int kColumnCount = Traits::kColumnCount;

  int warp, warps, sum_group, time_group, state_lane;
  Index batch, head, sweep, owned, start;  // `owned`: first index of the lane's own axis
  int steps;
  bool exists = true;   // the sweep
  bool begins = true;   // it is the first of its batch or sequence
  uint32_t starts = 0;  // bits of sequences that start at the lane's steps

  Accum k[kSteps][kRowCount];
  Accum q[kSteps][kRowCount];
  Accum v[kSteps][kColumnCount];
  Accum gate[kSteps][kColumnCount];
  Accum dy[kSteps][kColumnCount];  // times scale from summarize() on

  Accum decay[kColumnCount];     // product of a stretch's gates
  Accum state[kSummed][kOwned];  // what the stretch adds to a state at its end
  Accum flow[kSummed][kOwned];   // and to a gradient that flows back, at its start

  // Index of the n-th summed element, as load_packs deals them.
  __device__ __forceinline__ Index summed_index(int n) const {
    constexpr int kPack = largest_pack(kSummed, sizeof(Accum));
    return (n / kPack * Traits::kSumGroups + sum_group) * kPack + n % kPack;
  }
  __device__ __forceinline__ Index row_of(int a, int b) const {
    return Traits::kColumns ? summed_index(a) : owned + b;
  }
  __device__ __forceinline__ Index column_of(int a, int b) const {
    return Traits::kColumns ? owned + b : summed_index(a);
  }
  static __device__ __forceinline__ int row_slot(int a, int b) { return Traits::kColumns ? a : b; }
  static __device__ __forceinline__ int column_slot(int a, int b) {
    return Traits::kColumns ? b : a;
  }

  __device__ __forceinline__ BackwardLane(const Arguments& p, const BackwardLaunch& launch,
                                          Index tile) {
    const int lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    warps = blockDim.x / 32;
    sum_group = lane % Traits::kSumGroups;
    const int own_group = lane / Traits::kSumGroups % Traits::kOwnGroups;
    time_group = lane / Traits::kStateLanes;
    state_lane = lane % Traits::kStateLanes;
    owned = tile * Traits::kTileOwned + own_group * kOwned;
    start = (warp * Traits::kTimeGroups + time_group) * kSteps;
    Index end = p.T;
    if constexpr (Traits::kSmall) {
      head = blockIdx.x;
      batch = blockIdx.y;
      sweep = 0;
    } else {
      head = blockIdx.x / launch.sweeps;
      sweep = blockIdx.x % launch.sweeps;
      batch = launch.batch + blockIdx.y;
      if (p.borders == nullptr) {
        if (p.end != nullptr) end = min(end, *p.end);
        start += sweep * launch.sweep_steps;
        end = min(end, (sweep + 1) * launch.sweep_steps);
        begins = sweep == 0;
      } else {
        const Piece piece = piece_of(p.borders, p.sequences, launch.shift, sweep);
        batch = piece.sequence;
        start += piece.start;
        end = piece.start + piece.steps;
        exists = piece.exists;
        begins = piece.first;
      }
    }
    steps = static_cast<int>(min(max(end - start, Index{0}), Index{kSteps}));
    if constexpr (!Traits::kSmall) {
      if (p.starts != nullptr && steps > 0) starts = starts_from(p.starts, start);
    }
  }

  // Loads along the axis of rows (q, k) or that of columns (v, gate, dy).
  template <bool kRowAxis, bool kWhole, int kCount>
  __device__ __forceinline__ void load_operand(Accum (&out)[kSteps][kCount],
                                               const View<Index>& view, Dtype dtype,
                                               const Arguments& p) const {
    constexpr bool kOwnAxis = kRowAxis != Traits::kColumns;
    const Index channel = kOwnAxis ? owned : 0;
    const int group = kOwnAxis ? 0 : sum_group;
    const int groups = kOwnAxis ? 1 : Traits::kSumGroups;
    const Index count = (kRowAxis ? p.K : p.V) - channel;
    const Index head = kRowAxis && p.group != 1 ? this->head / p.group : this->head;
    if constexpr (Traits::kSmall) {
      const float* first = element_of<const float>(view, batch, start, head, channel);
      load_packs<kWhole>(out, view, first, group, groups, steps, count, false);
    } else {
      load_axis(out, view, dtype, offset_of(view, batch, start, head, channel), group, groups,
                steps, count, p.packed);
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void load_operands(const Arguments& p) {
    load_operand<true, kWhole>(k, p.k, p.dtype, p);
    load_operand<false, kWhole>(v, p.v, p.dtype, p);
    load_operand<false, kWhole>(gate, p.gate, p.gate_dtype, p);
    load_operand<true, kWhole>(q, p.q, p.dtype, p);
    if (p.dy.data != nullptr) {
      load_operand<false, kWhole>(dy, p.dy, p.dtype, p);
    } else {
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
#pragma unroll
        for (int n = 0; n < kColumnCount; ++n) dy[c][n] = 0;
      }
    }
  }

  __device__ __forceinline__ void load(const Arguments& p) {
    const Index summed = Traits::kColumns ? p.K : p.V;
    const Index own_axis = Traits::kColumns ? p.V : p.K;
    if (Traits::kSmall && steps == kSteps && summed == Traits::kSumGroups * kSummed &&
        owned + kOwned <= own_axis) {
      load_operands<Traits::kSmall>(p);
    } else {
      load_operands<false>(p);
    }
  }

  // As in SimtTile.
  __device__ __forceinline__ void finish_gate(const Arguments& p) {
    if (p.log_gate) {
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
#pragma unroll
        for (int n = 0; n < kColumnCount; ++n) gate[c][n] = exponential(gate[c][n]);
      }
    }
    if (steps < kSteps) {
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
#pragma unroll
        for (int n = 0; n < kColumnCount; ++n) gate[c][n] = c < steps ? gate[c][n] : 1;
      }
    }
    if (!Traits::kSmall && starts != 0) {
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
#pragma unroll
        for (int n = 0; n < kColumnCount; ++n) gate[c][n] = starts >> c & 1 ? 0 : gate[c][n];
      }
    }
  }

  // What the lane's own steps do: S_end = decay * S_before + state, and flow into the step before
  // them = decay * flow into their last + flow. Here dy takes the scale.
  __device__ __forceinline__ void summarize(Accum scale) {
#pragma unroll
    for (int n = 0; n < kColumnCount; ++n) decay[n] = 1;
#pragma unroll
    for (int a = 0; a < kSummed; ++a) {
#pragma unroll
      for (int b = 0; b < kOwned; ++b) state[a][b] = flow[a][b] = 0;
    }
#pragma unroll
    for (int c = kSteps - 1; c >= 0; --c) {
      Accum value[kColumnCount];
#pragma unroll
      for (int n = 0; n < kColumnCount; ++n) {
        value[n] = v[c][n] * decay[n];
        decay[n] *= gate[c][n];
      }
#pragma unroll
      for (int a = 0; a < kSummed; ++a) {
#pragma unroll
        for (int b = 0; b < kOwned; ++b) {
          state[a][b] = multiply_add(k[c][row_slot(a, b)], value[column_slot(a, b)], state[a][b]);
        }
      }
    }
    Accum prefix[kColumnCount];
#pragma unroll
    for (int n = 0; n < kColumnCount; ++n) prefix[n] = 1;
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      Accum value[kColumnCount];
#pragma unroll
      for (int n = 0; n < kColumnCount; ++n) {
        dy[c][n] *= scale;
        prefix[n] *= gate[c][n];
        value[n] = dy[c][n] * prefix[n];
      }
#pragma unroll
      for (int a = 0; a < kSummed; ++a) {
#pragma unroll
        for (int b = 0; b < kOwned; ++b) {
          flow[a][b] = multiply_add(q[c][row_slot(a, b)], value[column_slot(a, b)], flow[a][b]);
        }
      }
    }
  }

  // Publishes every lane's summary, then finds what precedes the lane's steps in the sweep and what
  // follows them. `before` and `after` come in as the state before the sweep and the flow into its
  // last step. In between a thread walks over the sweep's chunks, kSteps steps each, with one word
  // of a state or a flow.
  __device__ __forceinline__ void gather(Accum* shared, Accum (&before)[kSummed][kOwned],
                                         Accum (&after)[kSummed][kOwned]) {
    constexpr int kLanes = Traits::kStateLanes;
    constexpr int kChunk = Traits::kWords * kLanes;
    constexpr int kFlows = Traits::kElements * kLanes;  // from a chunk's states to its flows
    constexpr int kBatch = 8;                           // chunks whose words are read at once
    const int chunk = warp * Traits::kTimeGroups + time_group;
    const int chunks = warps * Traits::kTimeGroups;
    Accum* const own_decays = shared + chunk * kChunk + state_lane;
    Accum* const own_states = own_decays + kColumnCount * kLanes;
#pragma unroll
    for (int n = 0; n < kColumnCount; ++n) own_decays[n * kLanes] = decay[n];
#pragma unroll
    for (int a = 0; a < kSummed; ++a) {
#pragma unroll
      for (int b = 0; b < kOwned; ++b) {
        Accum* const word = own_states + (a * kOwned + b) * kLanes;
        const Accum factor = decay[column_slot(a, b)];
        word[0] = chunk == 0 ? multiply_add(factor, before[a][b], state[a][b]) : state[a][b];
        word[kFlows] =
            chunk == chunks - 1 ? multiply_add(factor, after[a][b], flow[a][b]) : flow[a][b];
      }
    }
    __syncthreads();
    for (int item = threadIdx.x; item < 2 * kFlows; item += blockDim.x) {
      const bool flows = item >= kFlows;
      const int element = (flows ? item - kFlows : item) / kLanes;
      const int column = column_slot(element / kOwned, element % kOwned);
      const int hop = flows ? -kChunk : kChunk;
      Accum* const first = shared + (flows ? (chunks - 1) * kChunk : 0);
      const Accum* const decays = first + column * kLanes + item % kLanes;
      Accum* const words = first + kColumnCount * kLanes + item;
      Accum carry = words[0];
#pragma unroll 1
      for (int begin = 1; begin < chunks; begin += kBatch) {
        Accum factor[kBatch];
        Accum word[kBatch];
#pragma unroll
        for (int e = 0; e < kBatch; ++e) {
          const int at = min(begin + e, chunks - 1);
          factor[e] = decays[at * hop];
          word[e] = words[at * hop];
        }
#pragma unroll
        for (int e = 0; e < kBatch; ++e) {
          if (begin + e >= chunks) break;
          words[(begin + e) * hop] = carry;
          carry = multiply_add(factor[e], carry, word[e]);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int a = 0; a < kSummed; ++a) {
#pragma unroll
      for (int b = 0; b < kOwned; ++b) {
        const Accum* const word = own_states + (a * kOwned + b) * kLanes;
        if (chunk > 0) before[a][b] = word[0];
        if (chunk < chunks - 1) after[a][b] = word[kFlows];
      }
    }
  }

  // Number of a pair's sweep in buffers. A slot belongs to one sequence.
  __device__ __forceinline__ int64_t block_of(const Arguments& p,
                                              const BackwardLaunch& launch) const {
    const int64_t pair = p.borders == nullptr ? batch * p.H + head : head;
    return pair * launch.sweeps + sweep;
  }

  // Element (a, b) of the lane in a (B, H, sweeps, K, V) buffer of the whole problem; null outside.
  __device__ __forceinline__ Accum* in_sweeps(void* buffer, const Arguments& p,
                                              const BackwardLaunch& launch, int a, int b) const {
    const int64_t row = row_of(a, b);
    const int64_t column = column_of(a, b);
    if (row >= p.K || column >= p.V) return nullptr;
    const int64_t block = block_of(p, launch);
    return static_cast<Accum*>(buffer) +
           (block * launch.all_rows + launch.row + row) * launch.all_columns + launch.column +
           column;
  }
};

// What each sweep makes of a zero state and of a zero flow, and its product of gates.
template <class Traits>
__global__ void __launch_bounds__(kBackwardWarps * 32, 1)
    simt_summarize_sweeps(const __grid_constant__ BackwardArguments<int64_t> p,
                          const __grid_constant__ BackwardLaunch launch) {
  using Accum = typename Traits::Accum;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  BackwardLane<Traits> lane(p, launch, launch.tile + blockIdx.z);
  if (!lane.exists) return;
  lane.load(p);
  lane.finish_gate(p);
  lane.summarize(static_cast<Accum>(p.scale));
  Accum before[Traits::kSummed][Traits::kOwned] = {};
  Accum after[Traits::kSummed][Traits::kOwned] = {};
  lane.gather(reinterpret_cast<Accum*>(shared_memory), before, after);
  const bool last = lane.warp == lane.warps - 1 && lane.time_group == Traits::kTimeGroups - 1;
  const bool first = lane.warp == 0 && lane.time_group == 0;
#pragma unroll
  for (int a = 0; a < Traits::kSummed; ++a) {
#pragma unroll
    for (int b = 0; b < Traits::kOwned; ++b) {
      const Accum decay = lane.decay[lane.column_slot(a, b)];
      Accum* state = lane.in_sweeps(launch.states, p, launch, a, b);
      if (state == nullptr) continue;
      if (last) *state = multiply_add(decay, before[a][b], lane.state[a][b]);
      if (first)
        *lane.in_sweeps(launch.flows, p, launch, a, b) =
            multiply_add(decay, after[a][b], lane.flow[a][b]);
    }
  }
  // The sweep's product of gates: of all chunks, which every lane finds in shared memory.
  if (!first || lane.sum_group != 0 || launch.row != 0) return;
#pragma unroll
  for (int b = 0; b < Traits::kOwned; ++b) {
    const int64_t column = lane.owned + b;
    if (column >= p.V) continue;
    Accum product = 1;
    for (int at = 0; at < lane.warps * Traits::kTimeGroups; ++at) {
      product *= reinterpret_cast<Accum*>(
          shared_memory)[(at * Traits::kWords + b) * Traits::kStateLanes + lane.state_lane];
    }
    const int64_t block = lane.block_of(p, launch);
    static_cast<Accum*>(launch.decays)[block * launch.all_columns + launch.column + column] =
        product;
  }
}

// Chains the sweeps: `states` become what precedes each sweep, `flows` what flows into its last
// step. One thread an element of the states.
template <typename Accum>
__global__ void chain_sweeps(const __grid_constant__ BackwardArguments<int64_t> p,
                             const __grid_constant__ BackwardLaunch launch, int64_t pairs) {
  const int64_t elements = p.K * p.V;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= pairs * elements) return;
  const int64_t pair = thread / elements;
  const int64_t row = thread % elements / p.V;
  const int64_t column = thread % p.V;
  const int64_t batch = pair / p.H;
  const int64_t head = pair % p.H;
  int64_t first = pair * launch.sweeps;
  int64_t sweeps = launch.sweeps;
  if (p.borders != nullptr) {
    first = head * launch.sweeps + first_slot(p.borders, launch.shift, batch);
    sweeps = slots_of(p.borders, launch.shift, batch);
  }
  Accum* states = static_cast<Accum*>(launch.states) + first * elements + row * p.V + column;
  Accum* flows = static_cast<Accum*>(launch.flows) + first * elements + row * p.V + column;
  const Accum* decays = static_cast<const Accum*>(launch.decays) + first * p.V + column;
  Accum state = 0;
  Accum flow = 0;
  if (p.initial_state.data != nullptr)
    state = *element_of<const Accum>(p.initial_state, batch, head, row, column);
  if (p.dfinal_state.data != nullptr)
    flow = *element_of<const Accum>(p.dfinal_state, batch, head, row, column);
  for (int64_t sweep = 0; sweep < sweeps; ++sweep) {
    const Accum end = multiply_add(decays[sweep * p.V], state, states[sweep * elements]);
    states[sweep * elements] = state;
    state = end;
  }
  for (int64_t sweep = sweeps - 1; sweep >= 0; --sweep) {
    const Accum start = multiply_add(decays[sweep * p.V], flow, flows[sweep * elements]);
    flows[sweep * elements] = flow;
    flow = start;
  }
}

// One block's work: its tile's gradients over one sweep.
template <class Traits>
__device__ __forceinline__ void backward_tile(const BackwardArguments<typename Traits::Index>& p,
                                              const BackwardLaunch& launch,
                                              typename Traits::Index tile) {
  using Accum = typename Traits::Accum;
  using Index = typename Traits::Index;
  constexpr int kSteps = Traits::kSteps;
  constexpr int kSummed = Traits::kSummed;
  constexpr int kOwned = Traits::kOwned;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  BackwardLane<Traits> lane(p, launch, tile);
  if (!Traits::kSmall && !lane.exists) return;
  lane.load(p);

  // ---- The state before the lane's steps, and what flows back into their last.
  Accum before[kSummed][kOwned] = {};
  Accum after[kSummed][kOwned] = {};
  const bool from_sweeps = !Traits::kSmall && launch.sweeps > 1;
  if (from_sweeps || p.initial_state.data != nullptr || p.dfinal_state.data != nullptr) {
#pragma unroll
    for (int a = 0; a < kSummed; ++a) {
#pragma unroll
      for (int b = 0; b < kOwned; ++b) {
        const Index row = lane.row_of(a, b);
        const Index column = lane.column_of(a, b);
        if (row >= p.K || column >= p.V) continue;
        if (from_sweeps) {
          before[a][b] = *lane.in_sweeps(launch.states, p, launch, a, b);
          after[a][b] = *lane.in_sweeps(launch.flows, p, launch, a, b);
          continue;
        }
        if (p.initial_state.data != nullptr)
          before[a][b] =
              *element_of<const Accum>(p.initial_state, lane.batch, lane.head, row, column);
        if (p.dfinal_state.data != nullptr)
          after[a][b] =
              *element_of<const Accum>(p.dfinal_state, lane.batch, lane.head, row, column);
      }
    }
  }
  lane.finish_gate(p);
  lane.summarize(static_cast<Accum>(p.scale));
  lane.gather(reinterpret_cast<Accum*>(shared_memory), before, after);

  // ---- Forward through the steps, keeping every state; backward through them, summing.
  Accum states[kSteps + 1][kSummed][kOwned];
#pragma unroll
  for (int a = 0; a < kSummed; ++a) {
#pragma unroll
    for (int b = 0; b < kOwned; ++b) {
      states[0][a][b] = before[a][b];
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
        const Accum update = lane.k[c][lane.row_slot(a, b)] * lane.v[c][lane.column_slot(a, b)];
        states[c + 1][a][b] =
            multiply_add(lane.gate[c][lane.column_slot(a, b)], states[c][a][b], update);
      }
    }
  }
  Accum sums[2][Traits::kValues];
#pragma unroll
  for (int c = kSteps - 1; c >= 0; --c) {
#pragma unroll
    for (int b = 0; b < kOwned; ++b) {
      Accum first = 0;
      Accum second = 0;
#pragma unroll
      for (int a = 0; a < kSummed; ++a) {
        const int row = lane.row_slot(a, b);
        const int column = lane.column_slot(a, b);
        const Accum r = multiply_add(lane.q[c][row], lane.dy[c][column], after[a][b]);
        if constexpr (Traits::kColumns) {
          first = multiply_add(lane.k[c][row], r, first);     // dv
          second = multiply_add(states[c][a][b], r, second);  // dgate
        } else {
          first = multiply_add(states[c + 1][a][b], lane.dy[c][column], first);  // dq
          second = multiply_add(lane.v[c][column], r, second);                   // dk
        }
        after[a][b] = r * lane.gate[c][column];
      }
      sums[0][c * kOwned + b] = first;
      sums[1][c * kOwned + b] = second;
    }
  }

  // ---- The gradient of the initial state is what flows out of the first step.
  if (Traits::kColumns && p.dinitial_state.data != nullptr && lane.begins && lane.warp == 0 &&
      lane.time_group == 0) {
#pragma unroll
    for (int a = 0; a < kSummed; ++a) {
#pragma unroll
      for (int b = 0; b < kOwned; ++b) {
        const Index row = lane.row_of(a, b);
        const Index column = lane.column_of(a, b);
        if (row < p.K && column < p.V)
          *element_of<Accum>(p.dinitial_state, lane.batch, lane.head, row, column) = after[a][b];
      }
    }
  }

  // ---- Sum over the lanes, store.
  const Index limit = Traits::kColumns ? p.V : p.K;
#pragma unroll
  for (int which = 0; which < 2; ++which)
    reduce_rows<Traits::kValues, Traits::kSumGroups / 2>(sums[which], lane.sum_group);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const View<Index>& target =
        Traits::kColumns ? (which == 0 ? p.dv : p.dgate) : (which == 0 ? p.dq : p.dk);
    if (target.data == nullptr) continue;
    if (lane.sum_group % Traits::kSharers != 0) continue;
    constexpr int kNeighbours = Traits::kOutputs < kOwned ? Traits::kOutputs : kOwned;
    constexpr int kPack = Traits::kSmall ? kNeighbours : 1;
#pragma unroll
    for (int n = 0; n < Traits::kOutputs; n += kPack) {
      const int flat = lane.sum_group / Traits::kSharers * Traits::kOutputs + n;
      const Index step = lane.start + flat / kOwned;
      const Index index = lane.owned + flat % kOwned;
      if (flat / kOwned >= lane.steps || index >= limit) continue;
      Accum* const total = &sums[which][n];
      if constexpr (!Traits::kSmall) {
        Accum* partial =
            element_of<Accum>(launch.partial[which], lane.batch, step, lane.head, index);
        if (launch.slice.accumulate) *total += *partial;
        if (!launch.slice.last) {
          *partial = *total;
          continue;
        }
      }
      if (!Traits::kSmall && Traits::kColumns && which == 1) {
        if (lane.starts >> flat / kOwned & 1) *total = 0;  // nothing comes before it
      }
      if (Traits::kColumns && which == 1 && p.log_gate) {
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
          const Index at = index + e;
          const Accum log = read_number<Accum>(
              p.gate.data, offset_of(p.gate, lane.batch, step, lane.head, at), p.gate_dtype);
          total[e] *= exponential(log);
        }
      }
      const int64_t offset = offset_of(target, lane.batch, step, lane.head, index);
      if constexpr (Traits::kSmall) {
        Pack<float, kPack> pack;
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack.at[e] = total[e];
        *reinterpret_cast<Pack<float, kPack>*>(static_cast<float*>(target.data) + offset) = pack;
      } else if (Traits::kColumns && which == 1) {
        static_cast<Accum*>(target.data)[offset] = *total;
      } else {
        write_number(target.data, offset, p.dtype, *total);
      }
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(kBackwardWarps * 32, 1)
    simt_backward(const __grid_constant__ BackwardArguments<int64_t> p,
                  const __grid_constant__ BackwardLaunch launch) {
  backward_tile<Traits>(p, launch, launch.tile + blockIdx.z);
}

// Both kinds of blocks side by side, for small problems: one launch less.
template <class Columns, class Rows>
__global__ void __launch_bounds__(kBackwardWarps * 32, 1)
    simt_backward_both(const __grid_constant__ BackwardArguments<int32_t> p) {
  const BackwardLaunch none;
  const int column_tiles = (p.V + Columns::kTileOwned - 1) / Columns::kTileOwned;
  const int tile = blockIdx.z;
  if (tile < column_tiles) {
    backward_tile<Columns>(p, none, tile);
  } else {
    backward_tile<Rows>(p, none, tile - column_tiles);
  }
}

// =================================== Tensor-core backward =====================================
//
// For large problems. Every kCheckpointSteps steps, a chunk of four tiles, are a block of their
// own. It finds two checkpoints: the state S before the chunk, left by the forward or by
// Walk::kStates, and the flow F into its last state, left by Walk::kStatesBack: the forward's
// kernel on q and dy in place of k and v, from the last step to the first.
//
// The block works from the top down: what it knows of a stretch of time gives the same of its two
// halves, and of a single step this is the gradient. For one column, with S before the stretch and
// F into its last state, let
//
//   z_t = scale * q_t . S      w_t = k_t . F      e = S . F      (sums over rows)
//
// A stretch of one step has dv_t = w_t + P[t, t] dy_t and dgate_t = e + dy_t z_t. Now a stretch of
// two halves with products of gates g1, g2. Let v_s be carried to the end of the first half, and
// dy_t back to the beginning of the second. With sums over the other half, and z, w and e on the
// right those of the whole,
//
//   first half:   z_s stays      w_s = g2 w_s + sum_t P[t, s] dy_t      e = g2 e + sum_t dy_t z_t
//   second half:  w_t stays      z_t = g1 z_t + sum_s P[t, s] v_s       e = g1 e + sum_s v_s w_s
//
// So each level is a product with P, masked to it, and with its transpose: the forward's levels,
// the longest first. From a chunk to its tiles it goes in the same way, one other tile after the
// other. The gradients of q and k are sums over columns,
//
//   dq = scale * (dy carried back to the chunk's beginning) S^T + M k
//   dk =         (v carried to the chunk's end) F^T             + M^T q
//   M[t, s] = scale * sum over columns of dy_t v_s gates s+1 .. t
//
// and M again splits in levels: dy_t carried back to a border times v_s carried to it.
//
// Each warp owns one tile of time, and 16 columns after the other; the layout is the forward's.

template <typename Element_, typename Gate_, int kChannels_, int kGroups_, int kBlocks_>
struct GradientTraits {
  using Element = Element_;
  using Gate = Gate_;
  static constexpr int kChannels = kChannels_;  // K and V are padded with zeros
  static constexpr int kSixteens = kChannels / 16;
  // Loops over these and over tiles. float32's three products for one would not fit the instruction
  // cache.
  static constexpr int kUnrolled = std::is_same_v<Element_, float> ? 1
                                   : kSixteens < 8                 ? kSixteens
                                                                   : 8;
  static constexpr int kUnrolledTiles = std::is_same_v<Element_, float> ? 1 : 4;
  static constexpr int kGroups = kGroups_;  // of four warps; each has its own columns: 1 or 2
  static constexpr int kBlocks = kBlocks_;  // that shall fit on a multiprocessor
  static constexpr bool kFloat = std::is_same_v<Element, float>;
  static constexpr int kTiles = 4;
  static constexpr int kSteps = 16 * kTiles;
  static_assert(kSteps == kCheckpointSteps, "a block per checkpoint");
  static constexpr int kWarps = kTiles * kGroups;
  static constexpr int kThreads = 32 * kWarps;
  // Rows of the state that a warp turns into dq and dk, 16 at a time, and of how many tiles.
  static constexpr int kTimeParts = kWarps > kChannels / 16 ? kWarps * 16 / kChannels : 1;
  static constexpr int kOwnTiles = kTiles / kTimeParts;
  static_assert(kTimeParts <= kTiles, "no warp without work");
  using RowTile = SharedTile<Element, kChannels, kSteps>;
  using GateTile = SharedTile<Gate, kChannels, kSteps>;
  using SideTile = SharedTile<Element, 64, 16>;  // 16 columns of each of four tiles, side by side
  using SideGate = SharedTile<Gate, 64, 16>;
  using Square = SharedTile<Element, kSteps, kSteps>;
  // Shared memory: q, k, v and dy, of which v and dy become operands of dk and dq, and q and k make
  // room for the results; the gate; P; sides, what the warps tell each other of 16 columns; sums of
  // M between tiles; staging, where dgate turns from columns to rows unless sides have room for it;
  // numbers of each column, twice. At the end M takes the place of sides, or of P too.
  static constexpr bool kStages = sizeof(Gate) > sizeof(Element);
  static constexpr int kBlocksOfP = kTiles * (kTiles + 1) / 2;
  static constexpr int kBlocksOfM = kBlocksOfP - kTiles;
  static constexpr int kProductBytes = 16 * 16 * sizeof(Element);
  static constexpr int kSumBytes = 16 * 16 * sizeof(float);
  static constexpr int kNumbers = 7 * kTiles;  // of a column: kDecay to kForLater below
  static constexpr int kNumberBytes = kNumbers * 16 * sizeof(float);
  static constexpr int kOperand = RowTile::kPanelBytes;
  static constexpr int kSides = SideTile::kPanelBytes;
  static constexpr int kOfK = kOperand;
  static constexpr int kOfV = 2 * kOperand;
  static constexpr int kOfDy = 3 * kOperand;
  static constexpr int kOfGate = 4 * kOperand;
  static constexpr int kOfP = kOfGate + GateTile::kPanelBytes;
  static constexpr int kOfSides = kOfP + kBlocksOfP * kProductBytes;
  static constexpr int kOfSums = kOfSides + 2 * kGroups * kSides;
  static constexpr int kOfStaging = kOfSums + kGroups * kBlocksOfM * kSumBytes;
  static constexpr int kOfNumbers = kOfStaging + (kStages ? kGroups * SideGate::kPanelBytes : 0);
  static constexpr int kBytes = kOfNumbers + 2 * kGroups * kNumberBytes;
  static constexpr int kOfM = kGroups == 1 ? kOfP : kOfSides;
  static_assert(kOfM + Square::kPanelBytes <= kOfSums, "M has room");
  static_assert(kTiles * kSumBytes <= kOfSides - kOfP || kGroups == 1, "so do sums of its blocks");
  static_assert(kOfP % 1024 == 0 && kOfSides % 1024 == 0, "tiles are permuted within rows");
};

struct GradientLaunch {
  unsigned chunks = 1;  // of time, for each (batch, head)
  float scale = 1;
  const void* states = nullptr;  // checkpoints of S
  const void* flows = nullptr;   // and of F
};

// Tiles as operands, for RowFragments.
template <typename Element_, class Tile>
struct OperandTile {
  using Element = Element_;
  using RowTile = Tile;
  static constexpr bool kFloat = std::is_same_v<Element, float>;
};

// A lane's part of a checkpoint's block, as left operand (columns, rows).
template <typename Element>
struct StateBlock {
  uint4 words[sizeof(Element) / 2];

  // Zeros if it isn't there.
  __device__ __forceinline__ void load(const Element* from, bool is_there) {
#pragma unroll
    for (int n = 0; n < static_cast<int>(sizeof(Element)) / 2; ++n) {
      words[n] = make_uint4(0, 0, 0, 0);
      if (is_there)
        words[n] = *reinterpret_cast<const uint4*>(from + n * Checkpoints<Element>::kBlock / 2);
    }
  }
  __device__ __forceinline__ float2 pair(int n) const {
    if constexpr (sizeof(Element) == 4) {
      const uint4& four = words[n / 2];
      return make_float2(__uint_as_float(n % 2 == 0 ? four.x : four.z),
                         __uint_as_float(n % 2 == 0 ? four.y : four.w));
    } else {
      return unpack<Element>(word(n));
    }
  }
  __device__ __forceinline__ uint32_t word(int n) const {
    const uint4& four = words[0];
    return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
  }
  __device__ __forceinline__ void operand(Operand<Element> (&to)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if constexpr (sizeof(Element) == 4) {
        to[n] = make_operand<Element>(pair(n).x, pair(n).y);
      } else {
        to[n].bits = word(n);
      }
    }
  }
};

// c += a b as multiply_8 and multiply_16; float32 sums join c outside the tensor core.
template <typename Element>
__device__ __forceinline__ void add_8(float (&c)[4], const Operand<Element>& a0,
                                      const Operand<Element>& a1, const Operand<Element>& b) {
  if constexpr (std::is_same_v<Element, float>) {
    float part[4] = {};
    multiply_8(part, a0, a1, b);
#pragma unroll
    for (int n = 0; n < 4; ++n) c[n] += part[n];
  } else {
    multiply_8(c, a0, a1, b);
  }
}
template <typename Element>
__device__ __forceinline__ void add_16(float (&c)[4], const Operand<Element> (&a)[4],
                                       const Operand<Element>& b0, const Operand<Element>& b1) {
  if constexpr (std::is_same_v<Element, float>) {
    float part[4] = {};
    multiply_16(part, a, b0, b1);
#pragma unroll
    for (int n = 0; n < 4; ++n) c[n] += part[n];
  } else {
    multiply_16(c, a, b0, b1);
  }
}

// An operand's elements times two factors.
template <typename Element>
__device__ __forceinline__ Operand<Element> scaled(const Operand<Element>& x, float2 factor) {
  float2 pair;
  if constexpr (std::is_same_v<Element, float>) {
    pair = make_float2(x.high[0] + x.low[0], x.high[1] + x.low[1]);
  } else {
    pair = unpack<Element>(x.bits);
  }
  return make_operand<Element>(pair.x * factor.x, pair.y * factor.y);
}

// Eight numbers [s][h][e] of a lane.
struct LaneTile {
  float at[2][2][2];

  template <typename Element>
  __device__ __forceinline__ void operand(Operand<Element> (&to)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      to[n] = make_operand<Element>(at[n / 2][n % 2][0], at[n / 2][n % 2][1]);
    }
  }
  __device__ __forceinline__ LaneTile times(const float (&factor)[2]) const {
    LaneTile result;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      result.at[n / 4][n / 2 % 2][n % 2] = at[n / 4][n / 2 % 2][n % 2] * factor[n / 2 % 2];
    }
    return result;
  }
  // For each column, the sum over the lane's steps of the products with the numbers of a result.
  __device__ __forceinline__ void dot(float (&sum)[2], const float (&result)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = at[0][h][0] * result[0][2 * h] + at[0][h][1] * result[0][2 * h + 1] +
               at[1][h][0] * result[1][2 * h] + at[1][h][1] * result[1][2 * h + 1];
    }
  }
};

// A LaneTile of numbers that were Elements in memory, packed as such to save registers.
template <typename Element>
struct KeptTile {
  uint32_t words[sizeof(Element) * 2];

  __device__ __forceinline__ explicit KeptTile(const LaneTile& from) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float (&pair)[2] = from.at[n / 2][n % 2];
      if constexpr (sizeof(Element) == 4) {
        words[2 * n] = __float_as_uint(pair[0]);
        words[2 * n + 1] = __float_as_uint(pair[1]);
      } else {
        words[n] = make_operand<Element>(pair[0], pair[1]).bits;
      }
    }
    // Or else the compiler sees that it has them in the other form too, and keeps that.
#pragma unroll
    for (uint32_t& word : words) keep(word);
  }
  __device__ __forceinline__ LaneTile tile() const {
    LaneTile result;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float2 pair;
      if constexpr (sizeof(Element) == 4) {
        pair = make_float2(__uint_as_float(words[2 * n]), __uint_as_float(words[2 * n + 1]));
      } else {
        pair = unpack<Element>(words[n]);
      }
      result.at[n / 2][n % 2][0] = pair.x;
      result.at[n / 2][n % 2][1] = pair.y;
    }
    return result;
  }
};

__device__ __forceinline__ void multiply_columns(float (&x)[2][4], float2 factor) {
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n / 4][n % 4] *= n / 2 % 2 == 0 ? factor.x : factor.y;
}

// Sum over the lanes that share columns.
__device__ __forceinline__ float sum_over_steps(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// A tile's own 16 x 16 block of M as accumulators: rows are slots of t, at[n] slots 8 n ... of s.
template <typename Element>
struct LevelSums {
  float at[2][4];

  // Adds sum over 16 columns of dy_t v_s at the places that `keep` names: keep(n, c).
  template <class Keep>
  __device__ __forceinline__ void add(const Operand<Element> (&dy)[4],
                                      const Operand<Element> (&v)[4], Keep keep) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float part[4] = {};
      multiply_16(part, dy, v[2 * n], v[2 * n + 1]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (keep(n, c)) at[n][c] += part[c];
      }
    }
  }
};

// M within the four steps of a lane: [t][s], s <= t, of its own columns.
struct LaneSums {
  float at[4][4];

  __device__ __forceinline__ void add(const LaneTile& dy, int t, const LaneTile& v, int s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      at[t][s] = fmaf(dy.at[t / 2][h][t % 2], v.at[s / 2][h][s % 2], at[t][s]);
    }
  }

  // Joins them over columns with the tile's sums, where lanes of even groups have even t.
  template <typename Element>
  __device__ __forceinline__ void join(LevelSums<Element>& m) const {
    const int lane = threadIdx.x % 32;
    const bool is_odd = lane / 4 % 2 == 1;
    const bool same_four = lane / 8 == lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int t = c / 2 * 2;
        const int s = 2 * n + c % 2;
        if (s > t + 1) continue;
        const float even = s <= t ? at[t][s] : 0.0f;
        float sum = is_odd ? at[t + 1][s] : even;
        sum += __shfl_xor_sync(~0u, is_odd ? even : at[t + 1][s], 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (same_four) m.at[n][c] += sum;
      }
    }
  }
};

// The operands of M: dy as left one (steps, columns), v as right one (columns, steps).
template <typename Element>
__device__ __forceinline__ void transpose_left(Operand<Element> (&to)[4], const LaneTile& tile) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float (&pair)[2] = tile.at[n % 2][n / 2];
    to[n] = transposed_operand<Element>(pair[0], pair[1]);
  }
}
template <typename Element>
__device__ __forceinline__ void transpose_right(Operand<Element> (&to)[4], const LaneTile& tile) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float (&pair)[2] = tile.at[n / 2][n % 2];
    to[n] = transposed_operand<Element>(pair[0], pair[1]);
  }
}

// 16 steps of a warp's 16 columns, and what the levels inside make of them.
template <class Traits>
struct GradientTile {
  using Element = typename Traits::Element;
  TimeTile<Traits> time;  // v, the gate and products of it
  LaneTile v;
  LaneTile dy;
  LaneTile v_ahead;        // carried to the end of the lane's four steps
  LaneTile dy_back;        // carried back to their beginning
  float other_eight[2];    // the gates of the four steps that are, with the lane's, an eight
  float other_sixteen[2];  // of the eight steps that are, with the lane's eight, the tile

  __device__ __forceinline__ void carry() {
    const auto& gate = time.gate;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // One of the two is 1.
      other_eight[h] = time.before_eight[h] * time.after_eight[h];
      other_sixteen[h] = time.before_sixteen[h] * time.after_sixteen[h];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      v_ahead.at[0][h][0] = v.at[0][h][0] * (gate[0][h][1] * time.pair[1][h]);
      v_ahead.at[0][h][1] = v.at[0][h][1] * time.pair[1][h];
      v_ahead.at[1][h][0] = v.at[1][h][0] * gate[1][h][1];
      v_ahead.at[1][h][1] = v.at[1][h][1];
      dy_back.at[0][h][0] = dy.at[0][h][0] * gate[0][h][0];
      dy_back.at[0][h][1] = dy.at[0][h][1] * time.pair[0][h];
      dy_back.at[1][h][0] = dy.at[1][h][0] * (time.pair[0][h] * gate[1][h][0]);
      dy_back.at[1][h][1] = dy.at[1][h][1] * (time.pair[0][h] * time.pair[1][h]);
    }
  }

  // v carried to the tile's end and by more gates, dy to its beginning.
  __device__ __forceinline__ LaneTile v_at_end(const float (&more)[2]) const {
    const float factor[2] = {after_eight(0) * after_sixteen(0) * more[0],
                             after_eight(1) * after_sixteen(1) * more[1]};
    return v_ahead.times(factor);
  }
  __device__ __forceinline__ LaneTile dy_at_start(const float (&more)[2]) const {
    const float factor[2] = {before_eight(0) * before_sixteen(0) * more[0],
                             before_eight(1) * before_sixteen(1) * more[1]};
    return dy_back.times(factor);
  }

  // From the tile's z, w and e to those of a lane's four steps, by levels 16 and 8; m takes in
  // these levels of the tile's block of M, without scale.
  __device__ __forceinline__ void descend(float (&z)[2][4], float (&w)[2][4], float (&e)[2],
                                          LevelSums<Element>& m, uint32_t products) const {
    uint32_t lane = threadIdx.x % 32;
    keep(lane);  // masks are quickly made: registers are worth more
    const int group = lane / 4;
    const int quad = lane % 4;
    const LevelMasks<Element> masks(group, quad);
    const TransposedMasks<Element> transposed(group, quad);
    TwoWayProducts<Element> p;
    TwoWayProducts<Element> back;
    p.load(products);
    back.load_transposed(products);
    Operand<Element> dy_left[4];
    Operand<Element> v_right[4];

    // ---- Eight steps from eight.
    {
      const float after[2] = {after_eight(0), after_eight(1)};
      const float before[2] = {before_eight(0), before_eight(1)};
      const LaneTile v_here = v_ahead.times(after);
      const LaneTile dy_here = dy_back.times(before);
      split(e, z, w, v_here, dy_here, quad / 2 == 1, 2, other_sixteen);
      add_level(z, v_here, p, masks.whole);
      add_level(w, dy_here, back, transposed.whole);
      transpose_left<Element>(dy_left, dy_here);
      transpose_right<Element>(v_right, v_here);
      const bool kept = quad < 2 && group >= 4;
      m.add(dy_left, v_right, [&](int, int) { return kept; });
    }
    // ---- Four from four.
    {
      split(e, z, w, v_ahead, dy_back, quad % 2 == 1, 1, other_eight);
      add_level(z, v_ahead, p, masks.eight);
      add_level(w, dy_back, back, transposed.eight);
      transpose_left<Element>(dy_left, dy_back);
      transpose_right<Element>(v_right, v_ahead);
      const bool kept = quad % 2 == 0 && group / 2 == quad + 1;
      m.add(dy_left, v_right, [&](int, int) { return kept; });
    }
  }

 private:
  __device__ __forceinline__ float before_eight(int h) const {
    return threadIdx.x % 2 == 1 ? other_eight[h] : 1.0f;
  }
  __device__ __forceinline__ float after_eight(int h) const {
    return threadIdx.x % 2 == 1 ? 1.0f : other_eight[h];
  }
  __device__ __forceinline__ float before_sixteen(int h) const {
    return threadIdx.x / 2 % 2 == 1 ? other_sixteen[h] : 1.0f;
  }
  __device__ __forceinline__ float after_sixteen(int h) const {
    return threadIdx.x / 2 % 2 == 1 ? 1.0f : other_sixteen[h];
  }

  // What a level does without P: e of the lane's half, and g1 z or g2 w. `second`: the lane's half
  // is the second; `other`: the other half's product of gates.
  static __device__ __forceinline__ void split(float (&e)[2], float (&z)[2][4], float (&w)[2][4],
                                               const LaneTile& v_here, const LaneTile& dy_here,
                                               bool second, int distance, const float (&other)[2]) {
    float of_first[2];
    float of_second[2];
    v_here.dot(of_first, w);
    dy_here.dot(of_second, z);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = second ? of_second[h] : of_first[h];
      if (distance == 2) sum += __shfl_xor_sync(~0u, sum, 1);
      e[h] = fmaf(other[h], e[h], __shfl_xor_sync(~0u, sum, distance));
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      z[n / 4][n % 4] *= second ? other[n / 2 % 2] : 1.0f;
      w[n / 4][n % 4] *= second ? 1.0f : other[n / 2 % 2];
    }
  }

  static __device__ __forceinline__ void add_level(float (&to)[2][4], const LaneTile& carried,
                                                   const Products<Element>& p,
                                                   const Mask<Element>& mask) {
    Operand<Element> left[4];
    carried.operand(left);
#pragma unroll
    for (int n = 0; n < 2; ++n) add_16(to[n], left, mask.of(p.at[n]), mask.of(p.at[n + 2]));
  }
};

// From z, w and e of a lane's four steps to those of each, by levels 4 and 2; in the end z and w
// are the gradients of the gate and of v.
template <typename Element>
__device__ __forceinline__ void descend_in_lane(float (&z)[2][4], float (&w)[2][4], float (&e)[2],
                                                LaneSums& m, uint32_t products, const LaneTile& v,
                                                const LaneTile& dy, const float (&gate)[2][2][2]) {
  uint32_t lane = threadIdx.x % 32;
  keep(lane);
  const int group = lane / 4;
  const int quad = lane % 4;
  const LevelMasks<Element> masks(group, quad);
  const TransposedMasks<Element> transposed(group, quad);
  TwoWayProducts<Element> p;
  TwoWayProducts<Element> back;
  p.load(products);
  back.load_transposed(products);
  float pair[2][2];
#pragma unroll
  for (int n = 0; n < 4; ++n) pair[n / 2][n % 2] = gate[n / 2][n % 2][0] * gate[n / 2][n % 2][1];

  // ---- Two from two: from here on within a lane.
  float each[2][2];  // e of the lane's pairs
  {
    LaneTile v_here = v;
    LaneTile dy_here = dy;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      v_here.at[0][h][0] *= gate[0][h][1];
      dy_here.at[1][h][0] *= gate[1][h][0];
      dy_here.at[1][h][1] *= pair[1][h];
      each[0][h] = pair[1][h] * e[h] + dy_here.at[1][h][0] * z[1][2 * h] +
                   dy_here.at[1][h][1] * z[1][2 * h + 1];
      each[1][h] = pair[0][h] * e[h] + v_here.at[0][h][0] * w[0][2 * h] +
                   v_here.at[0][h][1] * w[0][2 * h + 1];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        z[1][2 * h + n] *= pair[0][h];
        w[0][2 * h + n] *= pair[1][h];
      }
    }
    Operand<Element> v_left[4];
    Operand<Element> dy_right[4];
    v_here.operand(v_left);
    dy_here.operand(dy_right);
    add_8(z[1], v_left[0], v_left[1], masks.quad.of(p.at[1]));
    add_8(w[0], dy_right[2], dy_right[3], transposed.quad.of(back.at[2]));
#pragma unroll
    for (int n = 0; n < 4; ++n) m.add(dy_here, 2 + n / 2, v_here, n % 2);
  }
  // ---- One from one, and each step's own.
  Operand<Element> v_left[4];
  Operand<Element> own_left[4];
  LaneTile dy_here = dy;
  float gradient[2][4];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float (&two)[2] = gate[s][h];
      dy_here.at[s][h][1] *= two[1];
      const float first = two[1] * each[s][h] + dy_here.at[s][h][1] * z[s][2 * h + 1];
      const float second = two[0] * each[s][h] + v.at[s][h][0] * w[s][2 * h];
      gradient[s][2 * h] = first;
      gradient[s][2 * h + 1] = second;
      z[s][2 * h + 1] *= two[0];
      w[s][2 * h] *= two[1];
    }
  }
  v.operand(v_left);
  dy.operand(own_left);
  Operand<Element> dy_right[4];
  dy_here.operand(dy_right);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    add_8(z[s], v_left[2 * s], v_left[2 * s + 1], masks.pair.of(p.at[3 * s]));
    add_8(w[s], dy_right[2 * s], dy_right[2 * s + 1], transposed.pair.of(back.at[3 * s]));
    add_8(w[s], own_left[2 * s], own_left[2 * s + 1], masks.same.of(p.at[3 * s]));
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) m.add(dy, n, v, n);
  m.add(dy_here, 1, v, 0);
  m.add(dy_here, 3, v, 2);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int s = n / 4;
    const int c = n % 4;
    z[s][c] = fmaf(dy.at[s][c / 2][c % 2], z[s][c], gradient[s][c]);
  }
}

// Writes 16 steps of a warp's 16 columns from shared to global memory. `first`: of the tile's
// channels, a multiple of 16.
template <typename T, class Tile>
__device__ __forceinline__ void copy_tile_out(T* out, int64_t stride, int steps, int columns,
                                              uint32_t tile, int first) {
  constexpr int kElements = 16 / sizeof(T);
  constexpr int kChunks = 16 / kElements;
  const int lane = threadIdx.x % 32;
  // Neighbouring lanes read rows of different banks.
  const int lane_step = kChunks == 2 ? lane / 2 % 4 * 4 + lane / 8 : lane / kChunks;
  const int chunk = lane % kChunks;
#pragma unroll
  for (int n = 0; n < 16; n += 32 / kChunks) {
    const uint32_t from = tile + Tile::offset(slot_of(n + lane_step), first / kElements + chunk);
    const uint4 bytes = load_shared<uint4>(from);
    if (n + lane_step < steps && chunk * kElements < columns)
      *reinterpret_cast<uint4*>(out + (n + lane_step) * stride + chunk * kElements) = bytes;
  }
}

template <typename Element, class Tile>
__device__ __forceinline__ void store_pair(uint32_t tile, int slot, int channel, float first,
                                           float second) {
  if constexpr (std::is_same_v<Element, float>) {
    store_shared(tile + Tile::element(slot, channel), make_float2(first, second));
  } else {
    store_shared(tile + Tile::offset(slot, channel / 8) + channel % 8 * 2,
                 make_operand<Element>(first, second).bits);
  }
}

// A block of sums as accumulators, and back.
__device__ __forceinline__ void load_sums(float (&to)[2][4], uint32_t at) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float4 four = load_shared<float4>(at + n * 512);
    to[n][0] = four.x;
    to[n][1] = four.y;
    to[n][2] = four.z;
    to[n][3] = four.w;
  }
}
__device__ __forceinline__ void store_sums(const float (&from)[2][4], uint32_t at) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    store_shared(at + n * 512, make_float4(from[n][0], from[n][1], from[n][2], from[n][3]));
  }
}

template <class Fragments>
__device__ __forceinline__ void store_tile(const Fragments& fragments, const LaneTile& from,
                                           uint32_t tile) {
  float numbers[2][4];
#pragma unroll
  for (int n = 0; n < 8; ++n) numbers[n / 4][n % 4] = from.at[n / 4][n / 2 % 2][n % 2];
  fragments.store(numbers, tile);
}

// Blocks of a checkpoint whose loads are on their way together, `stride` elements apart.
template <class Traits>
struct StateBlocks {
  using Element = typename Traits::Element;
  static constexpr int kMost = Traits::kFloat ? 2 : 4;
  static constexpr int kCount = Traits::kSixteens < kMost ? Traits::kSixteens : kMost;
  StateBlock<Element> at[kCount];

  __device__ __forceinline__ void load(const Element* from, int stride, int first, int count) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) at[n].load(from + (first + n) * stride, first + n < count);
  }
};

// (steps, columns) times (columns, 16 rows of the state): `blocks` are those rows of a checkpoint,
// the first of them loaded.
template <class Traits>
__device__ __forceinline__ void multiply_states(
    float (&to)[Traits::kOwnTiles][2][4], StateBlocks<Traits>& block,
    const typename Traits::Element* blocks,
    const Checkpoints<typename Traits::Element>& checkpoints,
    const RowFragments<OperandTile<typename Traits::Element, typename Traits::RowTile>>& rows,
    uint32_t tiles) {
  using Element = typename Traits::Element;
  constexpr int kAtOnce = StateBlocks<Traits>::kCount;
  constexpr int kTurns = Traits::kUnrolled < kAtOnce ? 1 : Traits::kUnrolled / kAtOnce;
#pragma unroll
  for (int n = 0; n < 8 * Traits::kOwnTiles; ++n) to[n / 8][n / 4 % 2][n % 4] = 0;
#pragma unroll(kTurns)
  for (int columns = 0; columns < Traits::kSixteens; columns += kAtOnce) {
    if (columns > 0)
      block.load(blocks, checkpoints.row_blocks * checkpoints.kBlock, columns,
                 checkpoints.column_blocks);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      Operand<Element> right[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if constexpr (Traits::kFloat) {
          right[m] = transposed_operand<Element>(block.at[n].pair(m).x, block.at[n].pair(m).y);
        } else {
          right[m].bits = transpose_matrix(block.at[n].word(m));
        }
      }
#pragma unroll
      for (int u = 0; u < Traits::kOwnTiles; ++u) {
        Operand<Element> left[4];
        rows.load_left(left, tiles + u * 16 * Traits::RowTile::kRowBytes, columns + n);
        multiply_16_add<Element>(to[u][0], to[u][1], left, right);
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void gradient_block(const Params& p, const Gradients& grads,
                                               const GradientLaunch& launch) {
  using Element = typename Traits::Element;
  using Gate = typename Traits::Gate;
  using RowTile = typename Traits::RowTile;
  using SideTile = typename Traits::SideTile;
  constexpr int kTiles = Traits::kTiles;
  constexpr int kGroups = Traits::kGroups;
  constexpr int kRowTile = 16 * RowTile::kRowBytes;
  extern __shared__ __align__(1024) unsigned char tensor_memory[];
  const uint32_t shared = shared_address(tensor_memory);

  // ---- Who owns what.
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int tile = warp % kTiles;
  const int column_group = warp / kTiles;
  const uint32_t pair = blockIdx.x / launch.chunks;
  const int chunk = blockIdx.x - pair * launch.chunks;
  const uint32_t batch = pair / static_cast<uint32_t>(p.H);
  const uint32_t head = pair - batch * static_cast<uint32_t>(p.H);
  const int start = chunk * Traits::kSteps;
  const int steps = min(static_cast<int>(end_of_steps(p)) - start, Traits::kSteps);
  if (steps <= 0) return;  // these are nobody's
  const Checkpoints<Element> checkpoints(p);
  // They are counted as blocks are: over pairs, and their chunks.
  const auto states_at = [&](int64_t columns) {
    return checkpoints.at(static_cast<const Element*>(launch.states), 0, blockIdx.x, columns);
  };
  const auto flows_at = [&](int64_t columns) {
    return checkpoints.at(static_cast<const Element*>(launch.flows), 0, blockIdx.x, columns);
  };

  // ---- Loading.
  {
    using RowLoader = TileLoader<Element, RowTile, Traits::kChannels, Traits::kSteps,
                                 Traits::kThreads, false, true>;
    const uint32_t row_head = p.group == 1 ? head : head / static_cast<uint32_t>(p.group);
    RowLoader load_q(p.q, batch, start, row_head, 0, p.K);
    RowLoader load_k(p.k, batch, start, row_head, 0, p.K);
    load_q.start(shared, steps);
    load_k.start(shared + Traits::kOfK, steps);
    commit_copies();
    RowLoader load_v(p.v, batch, start, head, 0, p.V);
    RowLoader load_dy(grads.dy, batch, start, head, 0, p.V);
    TileLoader<Gate, typename Traits::GateTile, Traits::kChannels, Traits::kSteps, Traits::kThreads,
               false, true>
        load_gate(p.gate, batch, start, head, 0, p.V);
    load_v.start(shared + Traits::kOfV, steps);
    load_dy.start(shared + Traits::kOfDy, steps);
    if (p.gate.stride[3] == 0) {
      load_gate.spread(shared + Traits::kOfGate, steps);
    } else {
      load_gate.start(shared + Traits::kOfGate, steps);
    }
    commit_copies();
  }

  // ---- P = q k^T, times scale.
  using Rows = RowFragments<OperandTile<Element, RowTile>>;
  const auto products_at = [&](int later, int earlier) {
    return shared + Traits::kOfP + (later * (later + 1) / 2 + earlier) * Traits::kProductBytes;
  };
  // The flows come from the launch before this one. Columns first want P, and then all of these.
  wait_for_last_launch();
  if (threadIdx.x == 0) {
    const uint32_t bytes = static_cast<uint32_t>(checkpoints.elements() * sizeof(Element));
    prefetch(states_at(0), bytes);
    prefetch(flows_at(0), bytes);
  }
  wait_for_copies<1>();
  __syncthreads();
  for (int block = warp; block < Traits::kBlocksOfP; block += Traits::kWarps) {
    const Rows rows;
    const int later = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    const int earlier = block - later * (later + 1) / 2;
    const uint32_t q_tile = shared + later * kRowTile;
    const uint32_t k_tile = shared + Traits::kOfK + earlier * kRowTile;
    float sum[2][4] = {};
#pragma unroll Traits::kUnrolled
    for (int kk = 0; kk < Traits::kSixteens; ++kk) {  // channels that don't exist are zeros
      Operand<Element> left[4];
      Operand<Element> right[4];
      rows.load_left(left, q_tile, kk);
      rows.load_right(right, k_tile, kk);
      multiply_16_add<Element>(sum[0], sum[1], left, right);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c / 4][c % 4] *= launch.scale;
    TwoWayProducts<Element>::store(products_at(later, earlier), sum);
  }
  wait_for_copies<0>();
  __syncthreads();

  // ---- Columns, 16 at a time.
  const uint32_t v_sides = shared + Traits::kOfSides + column_group * 2 * Traits::kSides;
  const uint32_t dy_sides = v_sides + Traits::kSides;
  // Results turn in place of what the warps told each other, or where floats have more room.
  const uint32_t gate_staging =
      Traits::kStages ? shared + Traits::kOfStaging + column_group * Traits::SideGate::kPanelBytes
                      : dy_sides;
  const auto sums_at = [&](int of_group, int later, int earlier) {
    const int block = of_group * Traits::kBlocksOfM + later * (later - 1) / 2 + earlier;
    return shared + Traits::kOfSums + block * Traits::kSumBytes + lane * 16;
  };
  const int step = 16 * tile;
  const auto starts_of_lane = [&]() -> uint32_t {
    if (p.starts == nullptr || step >= steps) return 0;
    return starts_from(p.starts, start + step) >> 4 * quad & 15;
  };
  const uint32_t q_tile = shared + tile * kRowTile;
  const uint32_t k_tile = q_tile + Traits::kOfK;
  const uint32_t v_tile = q_tile + Traits::kOfV;
  const uint32_t dy_tile = q_tile + Traits::kOfDy;
  const uint32_t gate_tile = shared + Traits::kOfGate + tile * 16 * Traits::GateTile::kRowBytes;
  LevelSums<Element> own = {};
  LaneSums own_fours = {};
  const int turns = (static_cast<uint32_t>(checkpoints.column_blocks) + kGroups - 1) / kGroups;
  for (int turn = 0; turn < turns; ++turn) {
    const int columns = turn * kGroups + column_group;
    const bool exists = columns < checkpoints.column_blocks;
    // Addresses are quickly made: registers are worth more.
    int lane_now = lane;
    keep(lane_now);
    const Rows rows(lane_now);
    const RowFragments<OperandTile<Element, SideTile>> sides(lane_now);
    const ColumnFragments<Element, SideTile> own_side(16 * tile, lane_now);
    // What tiles tell each other of each column: numbers at these places.
    const uint32_t numbers =
        shared + Traits::kOfNumbers + (turn % 2 * kGroups + column_group) * Traits::kNumberBytes;
    const uint32_t own_numbers = numbers + group * 8;
    constexpr int kDecay = 0;              // of each tile
    constexpr int kForFirst = kTiles;      // of each tile: what it adds to e of those before it
    constexpr int kOfState = 2 * kTiles;   // e of the chunk, in parts
    constexpr int kForLater = 3 * kTiles;  // of two tiles: what the first adds to e of the second
    // Of columns group and group + 8.
    const auto read_numbers = [&](int number) {
      return load_shared<float2>(own_numbers + number * 64);
    };
    const auto write_numbers = [&](int number, const float (&values)[2]) {
      if (quad == 0) store_shared(own_numbers + number * 64, make_float2(values[0], values[1]));
    };

    const auto load_gates = [&](float (&gates)[2][2][2]) {
      Operand<Gate> unused[4];
      const ColumnFragments<Gate, typename Traits::GateTile> own_gate(16 * columns, lane_now);
      own_gate.load(gates, unused, gate_tile);
      if (__builtin_expect(p.log_gate || p.starts != nullptr || step + 16 > steps, 0)) {
        const uint32_t starts = starts_of_lane();
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          float& gate = gates[n / 4][n / 2 % 2][n % 2];
          const int at = n / 4 * 2 + n % 2;
          if (p.log_gate) gate = expf(gate);
          if (step + 4 * quad + at >= steps) gate = 1.0f;
          if (starts >> at & 1) gate = 0;
        }
      }
    };
    const auto load = [&](GradientTile<Traits>& at) {
      Operand<Element> unused[4];
      const ColumnFragments<Element, RowTile> own_columns(16 * columns, lane_now);
      load_gates(at.time.gate);
      own_columns.load(at.v.at, unused, v_tile);
      own_columns.load(at.dy.at, unused, dy_tile);
      at.time.multiply_gates();
      at.carry();
    };

    float z[2][4] = {};
    float w[2][4] = {};
    if (exists) {
      // On their way before anything else is done.
      constexpr int kAtOnce = StateBlocks<Traits>::kCount;
      constexpr int kTurns = Traits::kUnrolled < kAtOnce ? 1 : Traits::kUnrolled / kAtOnce;
      StateBlocks<Traits> state;
      StateBlocks<Traits> flow;
      const auto load_blocks = [&](int first) {
        state.load(states_at(columns), checkpoints.kBlock, first, checkpoints.row_blocks);
        flow.load(flows_at(columns), checkpoints.kBlock, first, checkpoints.row_blocks);
      };
      load_blocks(0);
      {
        GradientTile<Traits> at;
        load(at);
        const float no_more[2] = {1, 1};
        store_tile(own_side, at.v_at_end(no_more), v_sides);
        store_tile(own_side, at.dy_at_start(no_more), dy_sides);
        write_numbers(kDecay + tile, at.time.decay);
      }
      __syncwarp();

      // ---- z, w and e of the whole chunk.
      float state_part[2] = {0, 0};
#pragma unroll(kTurns)
      for (int kk = 0; kk < Traits::kSixteens; kk += kAtOnce) {
        if (kk > 0) load_blocks(kk);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          Operand<Element> left[4];
          Operand<Element> right[4];
          state.at[n].operand(left);
          rows.load_right(right, q_tile, kk + n);
          multiply_16_add<Element>(z[0], z[1], left, right);
          flow.at[n].operand(left);
          rows.load_right(right, k_tile, kk + n);
          multiply_16_add<Element>(w[0], w[1], left, right);
          if ((kk + n) % kTiles != tile) continue;
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const float2 s = state.at[n].pair(m);
            const float2 f = flow.at[n].pair(m);
            state_part[m % 2] = fmaf(s.x, f.x, fmaf(s.y, f.y, state_part[m % 2]));
          }
        }
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) z[n / 4][n % 4] *= launch.scale;
      LaneTile dy_start;
      Operand<Element> unused[4];
      own_side.load(dy_start.at, unused, dy_sides);
      float sum[2];
      dy_start.dot(sum, z);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] = sum_over_steps(sum[h]);
        state_part[h] = sum_over_steps(state_part[h]);
      }
      write_numbers(kForFirst + tile, sum);
      write_numbers(kOfState + tile, state_part);
    }
    __syncthreads();

    // ---- From the chunk's z and w to the tile's, and M between tiles.
    if (exists) {
#pragma unroll(Traits::kUnrolledTiles)
      for (int other = 0; other + 1 < kTiles; ++other) {
        if (other >= tile) break;
        TwoWayProducts<Element> products;
        products.load(products_at(tile, other));
        float unused[2][2][2];
        Operand<Element> left[4];
        const ColumnFragments<Element, SideTile> side(16 * other, lane_now);
        side.load(unused, left, v_sides);
        multiply_columns(z, read_numbers(kDecay + other));
        add_16(z[0], left, products.at[0], products.at[2]);
        add_16(z[1], left, products.at[1], products.at[3]);
      }
#pragma unroll(Traits::kUnrolledTiles)
      for (int other = kTiles - 1; other > 0; --other) {
        if (other <= tile) break;
        LaneTile v_end;
        Operand<Element> left[4];
        own_side.load(v_end.at, left, v_sides);
        float sum[2];
        v_end.dot(sum, w);
        sum[0] = sum_over_steps(sum[0]);
        sum[1] = sum_over_steps(sum[1]);
        write_numbers(kForLater + tile * kTiles + other, sum);
        TwoWayProducts<Element> products;
        products.load_transposed(products_at(other, tile));
        float unused[2][2][2];
        const ColumnFragments<Element, SideTile> side(16 * other, lane_now);
        side.load(unused, left, dy_sides);
        multiply_columns(w, read_numbers(kDecay + other));
        add_16(w[0], left, products.at[0], products.at[2]);
        add_16(w[1], left, products.at[1], products.at[3]);
      }
      if (tile > 0) {
        Operand<Element> start[4];
        sides.load_left(start, dy_sides, tile);
        float2 decay[2] = {make_float2(1, 1), make_float2(1, 1)};
#pragma unroll 1
        for (int other = tile - 1; other >= 0; --other) {
          Operand<Element> left[4];
          Operand<Element> right[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) left[n] = scaled(start[n], decay[n / 2]);
          sides.load_right(right, v_sides, other);
          const uint32_t to = sums_at(column_group, tile, other);
          float sum[2][4] = {};
          if (turn > 0) load_sums(sum, to);
          multiply_16_add<Element>(sum[0], sum[1], left, right);
          store_sums(sum, to);
          // Of columns 2 quad, 2 quad + 8, 2 quad + 1 and 2 quad + 9.
          const float4 more = load_shared<float4>(numbers + (kDecay + other) * 64 + quad * 16);
          decay[0] = make_float2(decay[0].x * more.x, decay[0].y * more.z);
          decay[1] = make_float2(decay[1].x * more.y, decay[1].y * more.w);
        }
      }
    }
    __syncthreads();

    // ---- From the tile's to each step's; operands of dq and dk.
    if (exists) {
      // e of the tile, from the chunk's: without the tiles after it, then without those before it.
      float before[2] = {1, 1};
      float after[2] = {1, 1};
      float e[2] = {0, 0};
#pragma unroll
      for (int other = 0; other < kTiles; ++other) {
        const float2 part = read_numbers(kOfState + other);
        e[0] += part.x;
        e[1] += part.y;
      }
      const auto leave_out = [&](int other, float (&decays)[2], int added) {
        const float2 decay = read_numbers(kDecay + other);
        const float2 more = read_numbers(added);
        decays[0] *= decay.x;
        decays[1] *= decay.y;
        e[0] = fmaf(decay.x, e[0], more.x);
        e[1] = fmaf(decay.y, e[1], more.y);
      };
#pragma unroll
      for (int other = kTiles - 1; other > 0; --other) {
        if (other > tile) leave_out(other, after, kForFirst + other);
      }
#pragma unroll
      for (int other = 0; other + 1 < kTiles; ++other) {
        if (other < tile) leave_out(other, before, kForLater + other * kTiles + tile);
      }
      GradientTile<Traits> at;
      load(at);
      __syncwarp();
      const ColumnFragments<Element, RowTile> own_columns(16 * columns, lane_now);
      const KeptTile<Element> v(at.v);
      const KeptTile<Element> dy(at.dy);
      store_tile(own_columns, at.v_at_end(after), v_tile);
      store_tile(own_columns, at.dy_at_start(before), dy_tile);
      at.descend(z, w, e, own, products_at(tile, tile));
      float gates[2][2][2];
      load_gates(gates);
      descend_in_lane<Element>(z, w, e, own_fours, products_at(tile, tile), v.tile(), dy.tile(),
                               gates);
      if (p.log_gate) {
#pragma unroll
        for (int n = 0; n < 8; ++n) z[n / 4][n % 4] *= gates[n / 4][n / 2 % 2][n % 2];
      }
      if (__builtin_expect(p.starts != nullptr, 0)) {
        const uint32_t starts = starts_of_lane();  // nothing comes before these steps
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          if (starts >> (n / 4 * 2 + n % 2) & 1) z[n / 4][n % 4] = 0;
        }
      }
      const int column = 16 * columns;
      const int columns_left = static_cast<int>(p.V) - column;
      int lane_then = lane;
      keep(lane_then);
      if (grads.dv.data != nullptr) {
        const ColumnFragments<Element, SideTile> own_place(16 * tile, lane_then);
        own_place.store(w, v_sides);
        __syncwarp();
        Element* const dv = steps_of<Element>(grads.dv, batch, start, head);
        copy_tile_out<Element, SideTile>(dv + step * grads.dv.stride[1] + column,
                                         grads.dv.stride[1], steps - step, columns_left, v_sides,
                                         16 * tile);
      }
      if (grads.dgate.data != nullptr) {
        const ColumnFragments<Gate, typename Traits::SideGate> own_place(16 * tile, lane_then);
        own_place.store(z, gate_staging);
        __syncwarp();
        Gate* const dgate = steps_of<Gate>(grads.dgate, batch, start, head);
        copy_tile_out<Gate, typename Traits::SideGate>(
            dgate + step * grads.dgate.stride[1] + column, grads.dgate.stride[1], steps - step,
            columns_left, gate_staging, 16 * tile);
      }
      __syncwarp();
    }
  }
  own_fours.join(own);
  if (grads.dq.data == nullptr && grads.dk.data == nullptr) return;

  // ---- dq and dk: rows of the states for their first part are on their way while M is made.
  constexpr int kSlices = Traits::kChannels / 16;
  const auto slice_of = [&](int item) {
    return warp % (Traits::kWarps / Traits::kTimeParts) + item * Traits::kWarps;
  };
  StateBlocks<Traits> state;
  StateBlocks<Traits> flow;
  const auto load_slice = [&](int slice) {
    if (slice >= checkpoints.row_blocks) return;
    const int stride = checkpoints.row_blocks * checkpoints.kBlock;
    state.load(states_at(0) + slice * checkpoints.kBlock, stride, 0, checkpoints.column_blocks);
    flow.load(flows_at(0) + slice * checkpoints.kBlock, stride, 0, checkpoints.column_blocks);
  };
  load_slice(slice_of(0));

  // ---- M: the sum over groups of columns, in their order, times scale.
  __syncthreads();
  const uint32_t own_sums = shared + Traits::kOfP + tile * Traits::kSumBytes + lane * 16;
  if constexpr (kGroups == 2) {
    if (column_group == 1) store_sums(own.at, own_sums);
    __syncthreads();
  }
  if (column_group == 0) {
    for (int earlier = 0; earlier <= tile; ++earlier) {
      float sum[2][4];
      float other[2][4] = {};
      if (earlier < tile) {
        load_sums(sum, sums_at(0, tile, earlier));
        if (kGroups == 2 && checkpoints.column_blocks > 1)
          load_sums(other, sums_at(1, tile, earlier));
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[n / 4][n % 4] = own.at[n / 4][n % 4];
        if (kGroups == 2) load_sums(other, own_sums);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int c = n % 2 * 2;
        store_pair<Element, typename Traits::Square>(
            shared + Traits::kOfM, step + group + n % 2 * 8, 16 * earlier + n / 2 * 8 + 2 * quad,
            launch.scale * (sum[n / 2][c] + other[n / 2][c]),
            launch.scale * (sum[n / 2][c + 1] + other[n / 2][c + 1]));
      }
    }
  }
  __syncthreads();

  // ---- dq and dk, 16 rows of the state at a time.
  constexpr int kOwnTiles = Traits::kOwnTiles;
  constexpr int kItems = (kSlices * Traits::kTimeParts + Traits::kWarps - 1) / Traits::kWarps;
  const int first_tile = warp * Traits::kTimeParts / Traits::kWarps * kOwnTiles;
  const uint32_t square = shared + Traits::kOfM;
  int lane_late = lane;
  keep(lane_late);
  const Rows rows(lane_late);
  const RowFragments<OperandTile<Element, typename Traits::Square>> squares(lane_late);
#pragma unroll 1
  for (int item = 0; item < kItems; ++item) {
    const int slice = slice_of(item);
    if (item > 0) load_slice(slice);
    float dq[kOwnTiles][2][4];
    float dk[kOwnTiles][2][4];
    const bool exists = slice < checkpoints.row_blocks;
    if (exists) {
      multiply_states<Traits>(dq, state, states_at(0) + slice * checkpoints.kBlock, checkpoints,
                              rows, shared + Traits::kOfDy + first_tile * kRowTile);
      multiply_states<Traits>(dk, flow, flows_at(0) + slice * checkpoints.kBlock, checkpoints, rows,
                              shared + Traits::kOfV + first_tile * kRowTile);
#pragma unroll
      for (int u = 0; u < kOwnTiles; ++u) {
#pragma unroll
        for (int n = 0; n < 8; ++n) dq[u][n / 4][n % 4] *= launch.scale;
      }
#pragma unroll
      for (int other = 0; other < kTiles; ++other) {
        Operand<Element> left[4];
        Operand<Element> k_right[4];
        Operand<Element> q_right[4];
        rows.load_transposed(k_right, shared + Traits::kOfK + other * kRowTile, slice);
        rows.load_transposed(q_right, shared + other * kRowTile, slice);
#pragma unroll
        for (int u = 0; u < kOwnTiles; ++u) {
          const int mine = first_tile + u;
          if (other <= mine) {
            squares.load_left(left, square + mine * 16 * Traits::Square::kRowBytes, other);
            multiply_16_add<Element>(dq[u][0], dq[u][1], left, k_right);
          }
          if (other >= mine) {
            squares.load_left_transposed(left, square + other * 16 * Traits::Square::kRowBytes,
                                         mine);
            multiply_16_add<Element>(dk[u][0], dk[u][1], left, q_right);
          }
        }
      }
    }
    // The results take the place of q and k, once nobody reads those rows any more.
    if constexpr (Traits::kTimeParts > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    if (exists) {
#pragma unroll
      for (int u = 0; u < kOwnTiles; ++u) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int slot = 16 * (first_tile + u) + group + n % 2 * 8;
          const int channel = 16 * slice + n / 2 * 8 + 2 * quad;
          const int c = n % 2 * 2;
          store_pair<Element, RowTile>(shared, slot, channel, dq[u][n / 2][c], dq[u][n / 2][c + 1]);
          store_pair<Element, RowTile>(shared + Traits::kOfK, slot, channel, dk[u][n / 2][c],
                                       dk[u][n / 2][c + 1]);
        }
      }
    }
  }
  __syncthreads();
  const auto copy_out = [&](const View<int64_t>& out, uint32_t from) {
    if (out.data == nullptr) return;
    constexpr int kElements = 16 / sizeof(Element);
    constexpr int kChunks = Traits::kChannels / kElements;
    constexpr int kStepsAtOnce = Traits::kThreads / kChunks;
    const int chunk = threadIdx.x % kChunks;
    const int first = threadIdx.x / kChunks;
    if (chunk * kElements >= static_cast<int>(p.K)) return;
    Element* const to = steps_of<Element>(out, batch, start, head) + chunk * kElements;
#pragma unroll
    for (int n = 0; n < Traits::kSteps; n += kStepsAtOnce) {
      const int at = n + first;
      if (at < steps && at < Traits::kSteps)
        *reinterpret_cast<uint4*>(to + at * out.stride[1]) =
            load_shared<uint4>(from + RowTile::offset(slot_of(at), chunk));
    }
  };
  copy_out(grads.dq, shared);
  copy_out(grads.dk, shared + Traits::kOfK);
}

// For sm_100 and later the compiler keeps more at hand than two blocks' registers hold, and spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kMostGradientBlocks = 1;
#else
constexpr int kMostGradientBlocks = 4;
#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, std::min(Traits::kBlocks, kMostGradientBlocks))
    tensor_backward(const __grid_constant__ Params p, const __grid_constant__ Gradients grads,
                    const __grid_constant__ GradientLaunch launch) {
  if constexpr (Traits::kBytes <= kMostSharedBytes) {
    gradient_block<Traits>(p, grads, launch);
    wait_for_last_launch();
  } else {
    __trap();
  }
}

// ======================================= Decode step ==========================================
//
// One step of time for each of many sequences, in place: S[i, j] = gate[j] S[i, j] + k[i] v[j],
// then y[j] = scale * sum_i q[i] S[i, j]. It is bound by memory: the state is read and written
// once, everything else is tiny. A block owns kColumnLanes packs of 16 bytes of one (batch, head)'s
// columns and all its rows. A thread starts the loads of kRows rows, and of all else that it needs,
// before it waits for anything. That is why the operands' types are template parameters: a load
// that is converted in a branch of its own is waited for there. The sum over rows runs over a
// thread's own, then the warp's row lanes by shuffles, then the warps in shared memory.

constexpr int kStepThreads = 256;

// Half-precision numbers are stored as their bits, whichever type they are of.
template <typename State_, typename Stored_, typename StoredGate_, int kColumnLanes_, int kHeld_,
          int kBlocks_>
struct StepTraits {
  using State = State_;
  using Stored = Stored_;  // of q, k and v
  using StoredGate = StoredGate_;
  using Accum = std::conditional_t<sizeof(State) == 8, double, float>;
  static constexpr int kColumnLanes = kColumnLanes_;
  static constexpr int kHeld = kHeld_;          // rows of the state that a block holds at once
  static constexpr int kBlocks = kBlocks_;      // that shall fit on a multiprocessor; 0: any state
  static constexpr bool kPacked = kBlocks > 0;  // rows of the state consist of whole aligned packs
  static constexpr int kPack = 16 / sizeof(State);
  static constexpr int kTile = kColumnLanes * kPack;
  static constexpr int kRowLanes = kStepThreads / kColumnLanes;
  static constexpr int kRows = kHeld / kRowLanes;
  static_assert(kTile <= kStepThreads, "a thread writes one column of y");
  static_assert(2 * kHeld <= kStepThreads, "a thread reads one number of q or k");
};

// Which row of the pool belongs to a batch; negative for none.
__device__ __forceinline__ int64_t pool_row(const StepParams& p, int64_t batch) {
  if (p.indices == nullptr) return batch;
  const int64_t at = batch * p.index_stride;
  return p.long_indices ? static_cast<const int64_t*>(p.indices)[at]
                        : static_cast<const int32_t*>(p.indices)[at];
}

// 16 bytes that nobody reads again before caches have forgotten them.
template <class T>
__device__ __forceinline__ T load_once(const void* from) {
  const uint4 bytes = __ldcs(static_cast<const uint4*>(from));
  T to;
  memcpy(&to, &bytes, 16);
  return to;
}
template <class T>
__device__ __forceinline__ void store_once(void* to, const T& from) {
  uint4 bytes;
  memcpy(&bytes, &from, 16);
  __stcs(static_cast<uint4*>(to), bytes);
}

// Addresses are made twice, for loads and for stores: that saves registers, so that more blocks fit
// on a multiprocessor.
template <class Traits>
__global__ void __launch_bounds__(kStepThreads, Traits::kPacked ? Traits::kBlocks : 1)
    decode_step(const __grid_constant__ StepParams p, int64_t first_head, int64_t first_batch) {
  using State = typename Traits::State;
  using Stored = typename Traits::Stored;
  using StoredGate = typename Traits::StoredGate;
  using Accum = typename Traits::Accum;
  constexpr int kPack = Traits::kPack;
  constexpr int kTile = Traits::kTile;
  constexpr int kColumnLanes = Traits::kColumnLanes;
  constexpr int kRowLanes = Traits::kRowLanes;
  constexpr int kRows = Traits::kRows;
  constexpr int kWarps = kStepThreads / 32;
  __shared__ Accum keys[Traits::kHeld];
  __shared__ Accum queries[Traits::kHeld];
  __shared__ Accum sums[kWarps][kTile];

  const int64_t tile = int64_t{blockIdx.x} * kTile;
  const int64_t head = first_head + blockIdx.y;
  const int64_t batch = first_batch + blockIdx.z;
  const int64_t row_head = p.group == 1 ? head : head / p.group;
  const int column_lane = threadIdx.x % kColumnLanes;
  const int row_lane = threadIdx.x / kColumnLanes;
  const int64_t column = tile + column_lane * kPack;
  const int64_t pool_at = pool_row(p, batch);

  if (pool_at < 0 || pool_at >= p.pool) {
    // A padded slot; an index beyond the pool is an error that nobody can raise here.
    if (threadIdx.x < kTile && tile + threadIdx.x < p.V) {
      const Accum number = pool_at < 0 ? Accum{0} : static_cast<Accum>(NAN);
      write_number(p.y.data, offset_of<int64_t>(p.y, batch, 0, head, tile + threadIdx.x), p.dtype,
                   number);
    }
    return;
  }

  const int64_t row_step = kRowLanes * p.state.stride[2];
  State* state = element_of<State, int64_t>(p.state, pool_at, head, row_lane, column);
  const bool bfloat = p.dtype == Dtype::kBFloat16;
  const bool bfloat_gate = p.gate_dtype == Dtype::kBFloat16;
  Accum y[kPack] = {};
  Accum value[kPack];
  Accum gate[kPack];
  for (int64_t first = 0; first < p.K; first += Traits::kHeld) {
    // ---- Everything is on its way before anything is used.
    const int rows = static_cast<int>(min(p.K - first, int64_t{Traits::kHeld})) - row_lane;
    const auto exists = [&](int n) { return n * kRowLanes < rows && column < p.V; };
    Pack<State, kPack> packs[kRows];
    State* from = state;
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      packs[n] = Pack<State, kPack>{};
      if constexpr (Traits::kPacked) {
        if (exists(n)) packs[n] = load_once<Pack<State, kPack>>(from);
      } else {
#pragma unroll
        for (int m = 0; m < kPack; ++m) {
          if (exists(n) && column + m < p.V) packs[n].at[m] = from[m * p.state.stride[3]];
        }
      }
      from += row_step;
    }
    const int own_row = threadIdx.x % Traits::kHeld;
    const bool of_k = threadIdx.x < Traits::kHeld;
    Stored of_row{};
    if (threadIdx.x < 2 * Traits::kHeld && first + own_row < p.K)
      of_row = *element_of<Stored, int64_t>(of_k ? p.k : p.q, batch, 0, row_head, first + own_row);
    if (first == 0) {
      Stored values[kPack];
      StoredGate gates[kPack];
#pragma unroll
      for (int m = 0; m < kPack; ++m) {
        const int64_t at = column + m < p.V ? column + m : p.V - 1;
        values[m] = *element_of<Stored, int64_t>(p.v, batch, 0, head, at);
        gates[m] = *element_of<StoredGate, int64_t>(p.gate, batch, 0, head, at);
      }
#pragma unroll
      for (int m = 0; m < kPack; ++m) {
        value[m] = number_of(values[m], bfloat);
        gate[m] = number_of(gates[m], bfloat_gate);
        if (p.log_gate) gate[m] = exponential(gate[m]);
      }
    } else {
      __syncthreads();
    }
    if (threadIdx.x < 2 * Traits::kHeld)
      (of_k ? keys : queries)[own_row] = number_of(of_row, bfloat);
    __syncthreads();

    // ---- The step itself, and the state back to where it was.
    keep(state);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const Accum key = keys[n * kRowLanes + row_lane];
      const Accum query = queries[n * kRowLanes + row_lane];
#pragma unroll
      for (int m = 0; m < kPack; ++m) {
        const Accum now = multiply_add(gate[m], to_accum(packs[n].at[m]), key * value[m]);
        y[m] = multiply_add(query, now, y[m]);
        packs[n].at[m] = from_accum<State>(now);
      }
      if constexpr (Traits::kPacked) {
        if (exists(n)) store_once(state, packs[n]);
      } else {
#pragma unroll
        for (int m = 0; m < kPack; ++m) {
          if (exists(n) && column + m < p.V) state[m * p.state.stride[3]] = packs[n].at[m];
        }
      }
      state += row_step;
    }
  }

  // ---- Sum over rows, in one order always.
#pragma unroll
  for (int m = 0; m < kPack; ++m) {
#pragma unroll
    for (int distance = kColumnLanes; distance < 32; distance *= 2)
      y[m] += __shfl_xor_sync(~0u, y[m], distance);
    if (threadIdx.x % 32 < kColumnLanes) sums[threadIdx.x / 32][column_lane * kPack + m] = y[m];
  }
  __syncthreads();
  if (threadIdx.x >= kTile || tile + threadIdx.x >= p.V) return;
  Accum total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp][threadIdx.x];
  write_number(p.y.data, offset_of<int64_t>(p.y, batch, 0, head, tile + threadIdx.x), p.dtype,
               total * static_cast<Accum>(p.scale));
}

// ====================================== Launching =============================================
//
// The rules that choose: worth_tensor_cores for the forward, worth_tensor_gradients for the
// backward, launch_tile and launch_step for tiles. "Processors" are multiprocessors.

constexpr int64_t kMaxGridX = INT32_MAX;
constexpr int64_t kMaxGridYZ = 65535;

int size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return 8;
    case Dtype::kFloat32:
      return 4;
    default:
      return 2;
  }
}

// The operand without its first (a, b, c, d) elements.
View<int64_t> skip(View<int64_t> view, int element_size, int64_t a, int64_t b, int64_t c,
                   int64_t d) {
  const int64_t elements =
      a * view.stride[0] + b * view.stride[1] + c * view.stride[2] + d * view.stride[3];
  if (view.data != nullptr) view.data = static_cast<char*>(view.data) + elements * element_size;
  return view;
}

// The part of a problem that starts at the given batch, head (the first of a group) and column.
Params skip(Params p, int64_t batch, int64_t head, int64_t column) {
  const int element = size_of(p.dtype);
  const int accum = p.dtype == Dtype::kFloat64 ? 8 : 4;
  p.q = skip(p.q, element, batch, 0, head / p.group, 0);
  p.k = skip(p.k, element, batch, 0, head / p.group, 0);
  p.v = skip(p.v, element, batch, 0, head, column);
  p.gate = skip(p.gate, size_of(p.gate_dtype), batch, 0, head, column);
  p.y = skip(p.y, element, batch, 0, head, column);
  p.partial = skip(p.partial, accum, batch, 0, head, column);
  if (p.borders != nullptr) p.borders += batch;
  p.initial_state = skip(p.initial_state, accum, batch, head, 0, column);
  p.final_state = skip(p.final_state, accum, batch, head, 0, column);
  p.B -= batch;
  p.H -= head;
  p.V -= column;
  return p;
}

Params slice_rows(Params p, int64_t row, int64_t rows) {
  const int element = size_of(p.dtype);
  const int accum = p.dtype == Dtype::kFloat64 ? 8 : 4;
  p.q = skip(p.q, element, 0, 0, 0, row);
  p.k = skip(p.k, element, 0, 0, 0, row);
  p.initial_state = skip(p.initial_state, accum, 0, 0, row, 0);
  p.final_state = skip(p.final_state, accum, 0, 0, row, 0);
  p.K = rows;
  return p;
}

template <typename Index>
View<Index> convert(const View<int64_t>& from) {
  View<Index> to;
  to.data = from.data;
  for (int axis = 0; axis < 4; ++axis) to.stride[axis] = static_cast<Index>(from.stride[axis]);
  return to;
}

template <typename Index>
Arguments<Index> convert(const Params& from) {
  Arguments<Index> to;
  to.q = convert<Index>(from.q);
  to.k = convert<Index>(from.k);
  to.v = convert<Index>(from.v);
  to.gate = convert<Index>(from.gate);
  to.y = convert<Index>(from.y);
  to.B = static_cast<Index>(from.B);
  to.T = static_cast<Index>(from.T);
  to.H = static_cast<Index>(from.H);
  to.K = static_cast<Index>(from.K);
  to.V = static_cast<Index>(from.V);
  to.group = static_cast<Index>(from.group);
  to.dtype = from.dtype;
  to.gate_dtype = from.gate_dtype;
  to.log_gate = from.log_gate;
  to.scale = from.scale;
  to.initial_state = convert<Index>(from.initial_state);
  to.final_state = convert<Index>(from.final_state);
  to.partial = convert<Index>(from.partial);
  to.sequences = static_cast<Index>(from.sequences);
  to.borders = from.borders;
  to.starts = from.starts;
  to.end = from.end;
  return to;
}

// May a packed kernel read or write the operand: whole aligned packs along the last axis, strides
// that fit 32 bits?
bool moves_in_packs(const View<int64_t>& view, const Params& p, int64_t channels, int pack,
                    int element_size) {
  const int64_t sizes[3] = {p.B, p.T, p.H};
  bool fits = reinterpret_cast<uintptr_t>(view.data) % (pack * element_size) == 0;
  fits = fits && channels % pack == 0 && view.stride[3] == 1;
  for (int axis = 0; axis < 3; ++axis) {
    fits = fits &&
           (sizes[axis] == 1 || (view.stride[axis] % pack == 0 && view.stride[axis] <= INT32_MAX));
  }
  return fits;
}

bool fits_index(const View<int64_t>& view) {
  return view.stride[0] <= INT32_MAX && view.stride[1] <= INT32_MAX &&
         view.stride[2] <= INT32_MAX && view.stride[3] <= INT32_MAX;
}

// T stays below INT32_MAX by more than a sweep, so that steps beyond the end don't overflow.
template <class Traits>
bool takes(const Params& p) {
  if constexpr (!Traits::kPacked) {
    return true;
  } else {
    constexpr int kElement = sizeof(typename Traits::Element);
    return p.K <= Traits::kRowGroups * Traits::kRows && p.V % Traits::kTileColumns == 0 &&
           p.T < INT32_MAX - 65536 && p.V <= INT32_MAX &&
           moves_in_packs(p.q, p, p.K, Traits::kRowPack, kElement) &&
           moves_in_packs(p.k, p, p.K, Traits::kRowPack, kElement) &&
           moves_in_packs(p.v, p, p.V, Traits::kColumns, kElement) &&
           moves_in_packs(p.gate, p, p.V, Traits::kColumns, size_of(p.gate_dtype)) &&
           moves_in_packs(p.y, p, p.V, Traits::kOutputPack, kElement) &&
           fits_index(p.initial_state) && fits_index(p.final_state);
  }
}

// Blocks get more warps while there is time for them, and at most max_warps in all.
template <class Traits>
cudaError_t launch_simt(const Params& p, Slice slice, int64_t max_warps, cudaStream_t stream) {
  const int64_t tiles = (p.V + Traits::kTileColumns - 1) / Traits::kTileColumns;
  const int64_t blocks = p.B * p.H * tiles;
  int warps = 1;
  while (2 * warps <= Traits::kMaxWarps && warps * Traits::kTimeGroups * Traits::kSteps < p.T &&
         2 * warps * blocks <= max_warps) {
    warps *= 2;
  }
  const int shared =
      2 * warps * Traits::kStateWords * Traits::kStateLanes * sizeof(typename Traits::Accum);
  // Once, unless a problem is larger than a grid can be.
  const int64_t max_heads = kMaxGridX - kMaxGridX % p.group;
  for (int64_t batch = 0; batch < p.B; batch += kMaxGridYZ) {
    for (int64_t head = 0; head < p.H; head += max_heads) {
      for (int64_t tile = 0; tile < tiles; tile += kMaxGridYZ) {
        const Params rest = skip(p, batch, head, tile * Traits::kTileColumns);
        const dim3 grid(std::min(rest.H, max_heads), std::min(rest.B, kMaxGridYZ),
                        std::min(tiles - tile, kMaxGridYZ));
        simt_forward<Traits>
            <<<grid, warps * 32, shared, stream>>>(convert<typename Traits::Index>(rest), slice);
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

// For SIMT kernels each packed sequence is a batch of its own, whose steps lie in the one row.
Params with_sequences_as_batches(Params p) {
  if (p.borders == nullptr) return p;
  p.B = p.sequences;
  p.partial.stride[0] = 0;
  return p;
}

// Narrow tiles cut a head's columns over many blocks and read q and k again in each; wide tiles
// read them less often. Which is faster turns on the number of state elements. Measured on an H200
// (132 processors), float32, us in a graph with the best number of warps, narrow / wide, by state
// elements: 8 k 8.5 / 32.4; 16 k 10.3 / 15.3; 65 k 23.8 / 32.8; 131 k 8.1 / 6.9; 524 k 254 / 174.
template <class Narrow, class Wide, class General>
cudaError_t launch_tile(const Params& p, Slice slice, int64_t processors, cudaStream_t stream) {
  const bool few_elements = p.B * p.H * p.K * p.V <= 1024 * processors;
  if (few_elements && takes<Narrow>(p)) {
    return launch_simt<Narrow>(p, slice, 16 * processors, stream);
  }
  if (takes<Wide>(p)) return launch_simt<Wide>(p, slice, 8 * processors, stream);
  return launch_simt<General>(p, slice, 8 * processors, stream);
}

template <typename Element>
struct FloatTraits {
  template <int kRowGroups, int kRows, int kTimeGroups, int kColumns, int kSteps, int kMaxWarps,
            bool kPacked = true>
  using Tile = SimtTraits<Element, float, kRowGroups, kRows, kTimeGroups, kColumns, kSteps,
                          kMaxWarps, kPacked>;
  using General32 = Tile<8, 4, 1, 4, 4, 4, false>;
  using General128 = Tile<16, 8, 1, 4, 4, 4, false>;

  static cudaError_t launch(const Params& p, Slice slice, int64_t processors, cudaStream_t stream) {
    const bool sliced = slice.accumulate || !slice.last;
    if (sliced || p.K > 64) {
      if (sliced) return launch_simt<General128>(p, slice, 8 * processors, stream);
      return launch_tile<Tile<32, 4, 1, 2, 16, 8>, Tile<16, 8, 1, 4, 4, 4>, General128>(
          p, slice, processors, stream);
    }
    if (p.K > 32)
      return launch_tile<Tile<16, 4, 2, 2, 8, 8>, Tile<16, 4, 1, 4, 8, 8>, General128>(
          p, slice, processors, stream);
    if (p.K > 24)
      return launch_tile<Tile<8, 4, 2, 2, 8, 8>, Tile<8, 4, 1, 4, 4, 8>, General32>(
          p, slice, processors, stream);
    if (p.K > 16)
      return launch_tile<Tile<8, 3, 2, 2, 8, 8>, Tile<8, 4, 1, 4, 4, 8>, General32>(
          p, slice, processors, stream);
    return launch_tile<Tile<8, 2, 2, 2, 8, 8>, Tile<8, 2, 1, 4, 8, 8>, General32>(
        p, slice, processors, stream);
  }
};

struct DoubleTraits {
  using General32 = SimtTraits<double, double, 8, 4, 1, 2, 4, 8, false>;
  using General64 = SimtTraits<double, double, 16, 4, 1, 2, 4, 8, false>;

  static cudaError_t launch(const Params& p, Slice slice, int64_t processors, cudaStream_t stream) {
    if (p.K > 32) return launch_simt<General64>(p, slice, 8 * processors, stream);
    return launch_simt<General32>(p, slice, 8 * processors, stream);
  }
};

// ---- Forward on tensor cores.

// Can an operand be copied in chunks of 16 bytes?
bool moves_in_chunks(const View<int64_t>& view, const Params& p, int element_size) {
  const int64_t sizes[3] = {p.B, p.T, p.H};
  bool fits = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride[3] == 1;
  for (int axis = 0; axis < 3; ++axis) {
    fits = fits && (sizes[axis] == 1 || view.stride[axis] * element_size % 16 == 0);
  }
  return fits;
}

struct Device {
  int processors = 0;
  int shared_bytes = 0;  // that a block may have
  int capability = 0;    // the major number

  // Of the current device. Calls ask several times, and a small one notices: the first to ask for a
  // device keeps the answer, three numbers below 2^21 in one word, 0 for none yet.
  cudaError_t read() {
    constexpr int kMostDevices = 64;
    constexpr int kBits = 21;
    constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
    static std::atomic<uint64_t> known[kMostDevices];
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    const bool keeps = error == cudaSuccess && device < kMostDevices;
    const uint64_t word = keeps ? known[device].load(std::memory_order_relaxed) : 0;
    if (word != 0) {
      processors = static_cast<int>(word & kMask);
      shared_bytes = static_cast<int>(word >> kBits & kMask);
      capability = static_cast<int>(word >> 2 * kBits);
      return error;
    }
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
      error =
          cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
    if (keeps && error == cudaSuccess) {
      known[device].store(static_cast<uint64_t>(processors) |
                              static_cast<uint64_t>(shared_bytes) << kBits |
                              static_cast<uint64_t>(capability) << 2 * kBits,
                          std::memory_order_relaxed);
    }
    return error;
  }
};

// How time would be cut; segments is 0 if the tensor-core kernel can't or shouldn't run.
struct TensorPlan {
  int64_t segments = 0;
  int64_t segment_steps = 0;
  int shift = 0;          // of packed sequences' pieces, whose slots are the segments
  int64_t parts = 1;      // of a segment, for the walk that finds its end
  int64_t end_bytes = 0;  // of p.scratch, for the ends
};

constexpr int kMostStages = 6;
constexpr int kMostKeptRows =
    128;  // of states that a forward leaves; larger ones take too much memory

// Chunks in shared memory: as many as leave room for the blocks meant on a multiprocessor, of each
// of which the system takes 1 KiB; or for fewer blocks. Copies and products want capability 8.0.
template <class Traits>
int tensor_stages(const Device& device, Walk walk) {
  int stages = 0;
  for (int blocks = Traits::blocks(walk); blocks > 0 && stages < kFewestStages; --blocks) {
    const int each = (device.shared_bytes + 1024) / blocks - 1024;
    stages = std::min(kMostStages, (each - Traits::kOtherBytes) / Traits::stage_bytes(walk));
  }
  return device.capability >= 8 ? stages : 0;
}

// Tensor cores or SIMT? A tensor-core block takes the same time for every size up to one block a
// multiprocessor, a SIMT one less the fewer state elements there are. Measured on an H200 (132
// processors), us in a graph, SIMT / tensor cores (in segments of time where there are several):
//
//   bfloat16, B*H, K = V     T = 64        128         256         512         1024        2048
//   64, 16                3.4 / 5.1   4.0 / 6.4   6.7 / 9.3   12 / 15     23 / 15     44 / 22
//   128, 16               3.9 / 5.1   6.6 / 6.5    12 / 9.4   22 / 15     42 / 22     85 / 37
//   16, 32                3.1 / 4.9   3.9 / 6.3   6.3 / 9.2   11 / 11     20 / 12     38 / 14
//   64, 32                5.8 / 5.1    10 / 6.5    17 / 9.4   32 / 15     62 / 16    174 / 25
//   8, 64                 4.0 / 4.8   6.5 / 6.3    11 / 9.4   21 / 11     39 / 12     74 / 14
//   64, 64                 11 / 5.0    21 / 6.6    41 / 9.6   80 / 16    178 / 25    351 / 43
//   4, 128                5.2 / 6.7   9.2 / 9.6    17 / 16    32 / 17     62 / 17    123 / 18
//   float32
//   128, 16               3.7 / 7.5   5.6 / 10    9.3 / 16    17 / 26     34 / 48     66 / 91
//   16, 32                2.9 / 6.8   3.7 / 9.4   5.8 / 15    10 / 15     18 / 19     34 / 21
//   128, 32               8.1 / 7.5    14 / 11     25 / 16    57 / 27    117 / 50    232 / 93
//   8, 64                 3.5 / 10    6.2 / 16     11 / 27    20 / 23     38 / 24     72 / 26
//   64, 64                9.8 / 11     18 / 17     34 / 28    72 / 51    143 / 98    282 / 188
//   8, 128                7.6 / 23     13 / 41     25 / 78    45 / 57     86 / 58    173 / 66
//   64, 128                23 / 24     44 / 43     97 / 80   189 / 155   377 / 303   750 / 600
bool worth_tensor_cores(const Params& p, const TensorPlan& plan, const Device& device) {
  if (chosen_kernels != Kernels::kByRule) return chosen_kernels == Kernels::kTensorCores;
  // Of packed sequences the average one.
  const int64_t batches = p.borders != nullptr ? p.sequences : p.B;
  const int64_t steps = p.borders != nullptr ? p.T / p.sequences : p.T;
  const int64_t elements = batches * p.H * p.K * p.V / device.processors;
  if (p.dtype == Dtype::kFloat32) {
    if (p.K <= 16) return false;
    // Columns per processor and row of the state, of which short ones count in proportion.
    const double heads =
        static_cast<double>(elements) / p.K * std::min<int64_t>(p.K, 64) / (64 * p.K);
    if (heads >= 0.45) return steps >= 128;
    if (plan.segments == 1) return heads >= 0.2 && steps >= 1024;
    return steps >= (heads >= 0.2 ? 384 : heads >= 0.1 ? 512 : heads >= 0.05 ? 1024 : 2048);
  }
  if (elements >= 4000) return steps >= 16;
  if (elements >= 400) return steps >= 64;
  if (elements >= 200) return steps >= 128;
  return plan.segments > 1 && steps >= (elements >= 100 ? 512 : 640);
}

template <class Traits>
TensorPlan plan_tiles(const Params& p, const Device& device) {
  TensorPlan plan;
  if (tensor_stages<Traits>(device, Walk::kOutputs) < kFewestStages) return plan;
  const int64_t tiles = (p.V + Traits::kColumns - 1) / Traits::kColumns;
  const int64_t blocks = p.B * p.H * tiles;
  plan.segments = 1;
  int64_t sequences = 1;
  if (p.borders != nullptr) {
    // Pieces so long that one row of them fills the machine once: only longer sequences are cut.
    const int64_t most = p.T * blocks / (Traits::kBlocks * device.processors);
    plan.shift = 8;
    while ((int64_t{1} << plan.shift) < most) ++plan.shift;
    plan.segments = p.sequences + (p.T >> plan.shift);
    sequences = p.sequences;
  } else {
    // Fewer than three segments gain nothing for what is read twice, nor do as many blocks as fit
    // for so few steps.
    const int64_t room = (p.T < 1024 ? 1 : Traits::kBlocks) * device.processors;
    if (3 * blocks <= room && p.T >= 3 * 128) {
      plan.segments = std::min(room / blocks, p.T / 128);
      if (p.starts != nullptr) plan.parts = 2;
    }
    const int64_t steps = (p.T + plan.segments - 1) / plan.segments;
    const int64_t unit = plan.parts * kCheckpointSteps;
    plan.segment_steps = (steps + unit - 1) / unit * unit;
    plan.segments = (p.T + plan.segment_steps - 1) / plan.segment_steps;
  }
  const int64_t parts = plan.segments * plan.parts;
  if (blocks * parts > kMaxGridX) plan.segments = 0;
  if (plan.segments > sequences)
    plan.end_bytes = blocks * parts * Traits::kWarps * Traits::kEndFloats * 4;
  return plan;
}

// `overlaps`: it may begin before the launch ahead of it has ended, which lets it. (The runtime
// captures such launches from 12.3 on.)
template <class Kernel, typename... Given>
cudaError_t launch_block_kernel(Kernel kernel, int64_t blocks, int threads, int shared,
                                bool overlaps, const Device& device, cudaStream_t stream,
                                const Given&... given) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps && CUDART_VERSION >= 12030 && device.capability >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, given...);
}

template <class Traits, Walk kWalk>
cudaError_t launch_tensor_kernel(const Params& p, const TensorLaunch& launch, bool overlaps,
                                 const Device& device, cudaStream_t stream) {
  const int64_t blocks = p.B * p.H * launch.tiles * launch.segments;
  const int shared = launch.stages * Traits::stage_bytes(kWalk) + Traits::kOtherBytes;
  return launch_block_kernel(tensor_forward<Traits, kWalk>, blocks, Traits::kThreads, shared,
                             overlaps, device, stream, p, launch);
}

template <class Traits, Walk kWalk>
cudaError_t launch_walk(const Params& p, const Device& device, const TensorPlan& plan,
                        void* checkpoints, cudaStream_t stream) {
  constexpr Walk kEnds = kWalk == Walk::kStatesBack ? Walk::kStatesBack : Walk::kStates;
  TensorLaunch launch;
  launch.segments = plan.segments;
  launch.segment_steps = plan.segment_steps;
  launch.shift = plan.shift;
  launch.tiles = (p.V + Traits::kColumns - 1) / Traits::kColumns;
  launch.stages = tensor_stages<Traits>(device, kWalk);
  launch.scale = static_cast<float>(p.scale);
  launch.parts = plan.parts;
  launch.all_parts = plan.segments * plan.parts;
  launch.ends = static_cast<float*>(p.scratch);
  const bool has_ends = plan.end_bytes > 0;
  if (has_ends) {
    TensorLaunch ends = launch;
    ends.segments = launch.all_parts;
    ends.segment_steps /= plan.parts;
    ends.stages = tensor_stages<Traits>(device, kEnds);
    const cudaError_t error = launch_tensor_kernel<Traits, kEnds>(p, ends, false, device, stream);
    if (error != cudaSuccess) return error;
  }
  launch.checkpoints = checkpoints;
  return launch_tensor_kernel<Traits, kWalk>(p, launch, has_ends, device, stream);
}

template <typename Element, typename Gate>
struct TensorKernels {
  static constexpr bool kFloat = std::is_same_v<Element, float>;
  template <int kRows, int kWarps, int kTiles, int kBlocks>
  using Alone = TensorTraits<Element, Gate, kRows, kWarps, kTiles, kBlocks>;
  template <int kRows, int kWarps, int kBlocks>
  using Pairs = TensorTraits<Element, Gate, kRows, kWarps, 2, kBlocks, 2>;
  // Pairs of warps hide more latency, but from 128 rows on a block has no registers for 128 columns
  // then, and q and k are read twice: 560 us became 637 for float32 (8, 2048, 16, 128), and 392 us
  // 534 for bfloat16 (4, 4096, 16, 256).
  using Tile32 = std::conditional_t<kFloat, Pairs<32, 4, 2>, Alone<32, 2, 2, 4>>;
  using Tile64 = std::conditional_t<kFloat, Pairs<64, 8, 1>, Alone<64, 4, 2, 2>>;
  using Tile128 = std::conditional_t<kFloat, Alone<128, 8, 1, 1>, Alone<128, 8, 2, 1>>;
  using Tile256 = Alone<256, 8, 1, 1>;  // not for float32: registers

  // Calls `use` with the traits that serve p.
  template <class Use>
  static auto with_traits(const Params& p, Use use) {
    if (p.K <= 32) return use(Tile32());
    if (p.K <= 64) return use(Tile64());
    if constexpr (!kFloat) {
      if (p.K > 128) return use(Tile256());
    }
    return use(Tile128());
  }

  static TensorPlan plan(const Params& p, const Device& device) {
    constexpr int kElement = sizeof(Element);
    const bool fits = p.K > 0 && p.K <= (kFloat ? 128 : 256) && p.K * kElement % 16 == 0 &&
                      p.V * kElement % 16 == 0 && p.T < INT32_MAX - 65536 &&
                      moves_in_chunks(p.q, p, kElement) && moves_in_chunks(p.k, p, kElement) &&
                      moves_in_chunks(p.v, p, kElement) &&
                      (p.y.data == nullptr || moves_in_chunks(p.y, p, kElement)) &&
                      (p.gate.stride[3] == 0 || moves_in_chunks(p.gate, p, sizeof(Gate)));
    if (!fits) return TensorPlan();
    return with_traits(p, [&](auto traits) { return plan_tiles<decltype(traits)>(p, device); });
  }

  template <Walk kWalk>
  static cudaError_t launch(const Params& p, const Device& device, void* checkpoints,
                            cudaStream_t stream) {
    const TensorPlan ready = plan(p, device);
    return with_traits(p, [&](auto traits) {
      using Traits = decltype(traits);
      if constexpr (kWalk == Walk::kTraining && Traits::kRows > kMostKeptRows) {
        return cudaErrorNotSupported;
      } else {
        return launch_walk<Traits, kWalk>(p, device, ready, checkpoints, stream);
      }
    });
  }
};

// Calls `use` with the tensor-core kernels for p's types; Element is q's.
template <typename Element, class Use>
auto with_tensor_kernels(const Params& p, Use use) {
  if constexpr (sizeof(Element) == 2) {
    if (p.gate_dtype != Dtype::kFloat32) return use(TensorKernels<Element, Element>());
  }
  return use(TensorKernels<Element, float>());
}

// How tensor cores would walk over p, whether it is worth it or not.
template <typename Element>
TensorPlan plan_walk(const Params& p, const Device& device) {
  return with_tensor_kernels<Element>(p, [&](auto kernels) { return kernels.plan(p, device); });
}

TensorPlan plan_walk(const Params& p, const Device& device) {
  switch (p.dtype) {
    case Dtype::kFloat32:
      return plan_walk<float>(p, device);
    case Dtype::kFloat16:
      return plan_walk<__half>(p, device);
    case Dtype::kBFloat16:
      return plan_walk<__nv_bfloat16>(p, device);
    default:
      return TensorPlan();
  }
}

// The same for the forward; segments is 0 if SIMT kernels shall do it.
TensorPlan plan_tensor(const Params& p, const Device& device) {
  TensorPlan plan = plan_walk(p, device);
  if (plan.segments > 0 && !worth_tensor_cores(p, plan, device)) plan.segments = 0;
  return plan;
}

template <typename Element, Walk kWalk>
cudaError_t launch_tensor(const Params& p, void* checkpoints, cudaStream_t stream) {
  Device device;
  const cudaError_t error = device.read();
  if (error != cudaSuccess) return error;
  return with_tensor_kernels<Element>(p, [&](auto kernels) {
    return decltype(kernels)::template launch<kWalk>(p, device, checkpoints, stream);
  });
}

template <typename Element>
cudaError_t launch_walks(const Params& p, cudaStream_t stream) {
  if (p.y.data == nullptr) return launch_tensor<Element, Walk::kStates>(p, p.states, stream);
  if (p.states == nullptr) return launch_tensor<Element, Walk::kOutputs>(p, nullptr, stream);
  return launch_tensor<Element, Walk::kTraining>(p, p.states, stream);
}

// ---- Backward on tensor cores.

template <typename Element, typename Gate>
struct GradientKernels {
  static constexpr bool kFloat = std::is_same_v<Element, float>;
  template <int kChannels, int kGroups, int kBlocks>
  using Tile = GradientTraits<Element, Gate, kChannels, kGroups, kBlocks>;
  // float32 wants registers for its parts; float32 gates too, and shared memory besides. Measured
  // on an H200, us of the kernel by kGroups, kBlocks, bfloat16: (8, 2048, 16, 32) 2, 2: 136;
  // 2, 3: 123; 1, 4: 108. (8, 2048, 16, 64) 2, 2: 234; 1, 3: 232. (8, 2048, 16, 128) 2, 2: 510;
  // 1, 2: 599. (4, 4096, 16, 256) 2, 1: 2011; 1, 1: 3270. float32, (8, 2048, 16, 128) 2, 1: 1890;
  // 1, 1: 2732.
  static constexpr bool kWide = sizeof(Gate) == 4;
  using Tile32 = Tile<32, 1, kWide ? 2 : 4>;
  using Tile64 = Tile<64, 1, kWide ? 2 : 3>;
  using Tile128 = Tile<128, 2, kWide ? 1 : 2>;
  using Tile256 = Tile<256, kWide ? 1 : 2, 1>;

  template <class Use>
  static auto with_traits(const Params& p, Use use) {
    const int64_t channels = std::max(p.K, p.V);
    if (channels <= 32) return use(Tile32());
    if (channels <= 64) return use(Tile64());
    if constexpr (!kFloat) {
      if (channels > 128) return use(Tile256());
    }
    return use(Tile128());
  }

  static bool fit(const Params& p, const Device& device) {
    if (std::max(p.K, p.V) > (kFloat ? 128 : 256)) return false;
    return with_traits(p, [&](auto traits) { return traits.kBytes <= device.shared_bytes; });
  }

  static cudaError_t launch(const Params& p, const Gradients& grads, const GradientLaunch& launch,
                            const Device& device, cudaStream_t stream) {
    return with_traits(p, [&](auto traits) {
      using Traits = decltype(traits);
      return launch_block_kernel(tensor_backward<Traits>, p.B * p.H * launch.chunks,
                                 Traits::kThreads, Traits::kBytes, true, device, stream, p, grads,
                                 launch);
    });
  }
};

template <typename Element, class Use>
auto with_gradient_kernels(const Params& p, Use use) {
  if constexpr (sizeof(Element) == 2) {
    if (p.gate_dtype != Dtype::kFloat32) return use(GradientKernels<Element, Element>());
  }
  return use(GradientKernels<Element, float>());
}

bool gradients_fit(const Params& p, const Device& device) {
  const auto fit = [&](auto kernels) { return kernels.fit(p, device); };
  switch (p.dtype) {
    case Dtype::kFloat32:
      return with_gradient_kernels<float>(p, fit);
    case Dtype::kFloat16:
      return with_gradient_kernels<__half>(p, fit);
    case Dtype::kBFloat16:
      return with_gradient_kernels<__nv_bfloat16>(p, fit);
    default:
      return false;
  }
}

// The problem of Walk::kStatesBack, whose states are flows. Without grads, enough for its plan.
Params flowing_back(const Params& p, const Gradients* grads) {
  Params back = p;
  back.k = p.q;
  back.y = View<int64_t>();
  if (grads != nullptr) {
    back.v = grads->dy;
    back.initial_state = grads->dfinal_state;
    back.final_state = grads->dinitial_state;
  }
  return back;
}

// An estimate: SIMT kernels take about 13 ps for a step of a state's element on an H200, so 100 us
// for this many. Below that the tensor cores' walks and their launches don't pay.
bool worth_tensor_gradients(const Params& p) {
  if (p.borders != nullptr) return false;  // with states packed sequences take SIMT kernels so far
  if (chosen_kernels != Kernels::kByRule) return chosen_kernels == Kernels::kTensorCores;
  return p.B * p.H * p.T * p.K * p.V >= int64_t{1} << 23;
}

// Where the tensor-core backward's temporaries lie in its scratch memory, in bytes; total is 0 if
// it doesn't take the problem.
struct GradientScratch {
  int64_t chunks = 0;
  int64_t state_bytes = 0;  // of all checkpoints
  int64_t states = 0;       // nothing of it if the forward left them
  int64_t flows = 0;
  int64_t segments = 0;
  int64_t total = 0;

  GradientScratch(const Params& p, const Device& device) {
    Params ahead = p;
    ahead.y = View<int64_t>();
    const TensorPlan there = plan_walk(ahead, device);
    const TensorPlan back = plan_walk(flowing_back(p, nullptr), device);
    chunks = (p.T + kCheckpointSteps - 1) / kCheckpointSteps;
    if (there.segments == 0 || back.segments == 0 || !gradients_fit(p, device) ||
        p.B * p.H * chunks > kMaxGridX) {
      return;
    }
    const int64_t blocks = (p.K + 15) / 16 * ((p.V + 15) / 16);
    state_bytes = p.B * p.H * chunks * blocks * 256 * size_of(p.dtype);
    flows = states + (p.states == nullptr ? state_bytes : 0);
    segments = flows + state_bytes;
    total = segments + std::max(there.end_bytes, back.end_bytes);
  }
};

template <typename Element>
cudaError_t launch_gradients(Params p, const Gradients& grads, void* scratch, cudaStream_t stream) {
  Device device;
  cudaError_t error = device.read();
  if (error != cudaSuccess) return error;
  const GradientScratch at(p, device);
  const auto place = [&](int64_t offset) { return static_cast<char*>(scratch) + offset; };
  p.scratch = place(at.segments);
  error =
      launch_tensor<Element, Walk::kStatesBack>(flowing_back(p, &grads), place(at.flows), stream);
  if (error != cudaSuccess) return error;
  GradientLaunch launch;
  launch.chunks = static_cast<unsigned>(at.chunks);
  launch.scale = static_cast<float>(p.scale);
  launch.states = p.states != nullptr ? p.states : place(at.states);
  launch.flows = place(at.flows);
  return with_gradient_kernels<Element>(
      p, [&](auto kernels) { return kernels.launch(p, grads, launch, device, stream); });
}

// ---- Backward on SIMT kernels.

// All operands that move along the last axis in packs of at most 16 bytes.
bool moves_in_packs(const Params& p, const Gradients& grads) {
  const int element = size_of(p.dtype);
  const int gate = size_of(p.gate_dtype);
  const int pack = p.dtype == Dtype::kFloat64 ? 2 : 4;
  const auto fits = [&](const View<int64_t>& view, int64_t channels, int size) {
    return view.data == nullptr || moves_in_packs(view, p, channels, pack, size);
  };
  return fits(p.q, p.K, element) && fits(p.k, p.K, element) && fits(p.v, p.V, element) &&
         fits(p.gate, p.V, gate) && fits(grads.dy, p.V, element);
}

template <typename Index>
BackwardArguments<Index> backward_arguments(const Params& p, const Gradients& grads) {
  BackwardArguments<Index> to;
  to.k = convert<Index>(p.k);
  to.v = convert<Index>(p.v);
  to.gate = convert<Index>(p.gate);
  to.q = convert<Index>(p.q);
  to.dy = convert<Index>(grads.dy);
  to.T = static_cast<Index>(p.T);
  to.H = static_cast<Index>(p.H);
  to.K = static_cast<Index>(p.K);
  to.V = static_cast<Index>(p.V);
  to.group = static_cast<Index>(p.group);
  to.log_gate = p.log_gate;
  to.packed = moves_in_packs(p, grads);
  to.dtype = p.dtype;
  to.gate_dtype = p.gate_dtype;
  to.scale = p.scale;
  to.initial_state = convert<Index>(p.initial_state);
  to.dfinal_state = convert<Index>(grads.dfinal_state);
  to.dv = convert<Index>(grads.dv);
  to.dgate = convert<Index>(grads.dgate);
  to.dq = convert<Index>(grads.dq);
  to.dk = convert<Index>(grads.dk);
  to.dinitial_state = convert<Index>(grads.dinitial_state);
  to.sequences = static_cast<Index>(p.sequences);
  to.borders = p.borders;
  to.starts = p.starts;
  to.end = p.end;
  return to;
}

Params slice_columns(Params p, int64_t column, int64_t count) {
  p = skip(p, 0, 0, column);
  p.V = count;
  return p;
}

// Steps of a sweep: what kBackwardWarps warps can hold.
int64_t backward_sweep_steps(const Params& p) {
  int64_t longest = 64;
  if (p.dtype == Dtype::kFloat64) longest = 32;
  if (p.dtype != Dtype::kFloat64 && std::max(p.K, p.V) <= 32) longest = 128;
  if (p.borders != nullptr) return longest;
  return std::min(longest, (p.T + 15) / 16 * 16);
}

int64_t backward_sweeps(const Params& p) {
  const int64_t steps = backward_sweep_steps(p);
  if (p.borders != nullptr) return p.sequences + p.T / steps;
  return (p.T + steps - 1) / steps;
}

template <class Traits>
int64_t owned_tiles(const Params& p) {
  const int64_t owned = Traits::kColumns ? p.V : p.K;
  return (owned + Traits::kTileOwned - 1) / Traits::kTileOwned;
}

template <class Traits>
int backward_warps(int64_t sweep_steps) {
  return static_cast<int>(sweep_steps / (Traits::kTimeGroups * Traits::kSteps));
}

template <class Traits>
int backward_shared(int warps) {
  const int words = warps * Traits::kTimeGroups * Traits::kWords * Traits::kStateLanes;
  return words * sizeof(typename Traits::Accum);
}

template <class Traits, class Kernel>
cudaError_t launch_blocks(Kernel kernel, const Params& p, const Gradients& grads,
                          BackwardLaunch launch, cudaStream_t stream) {
  const int warps = backward_warps<Traits>(launch.sweep_steps);
  const int64_t tiles = owned_tiles<Traits>(p);
  const BackwardArguments<int64_t> arguments = backward_arguments<int64_t>(p, grads);
  if (p.H * launch.sweeps > kMaxGridX) return cudaErrorInvalidConfiguration;
  for (launch.batch = 0; launch.batch < p.B; launch.batch += kMaxGridYZ) {
    for (launch.tile = 0; launch.tile < tiles; launch.tile += kMaxGridYZ) {
      const dim3 grid(p.H * launch.sweeps, std::min(p.B - launch.batch, kMaxGridYZ),
                      std::min(tiles - launch.tile, kMaxGridYZ));
      kernel<<<grid, warps * 32, backward_shared<Traits>(warps), stream>>>(arguments, launch);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

// Does the kernel with both kinds of blocks take a problem of K, V <= 32?
bool is_small(const Params& p, const Gradients& grads, const BackwardLaunch& launch) {
  const auto fits = [&](const View<int64_t>& view, int64_t channels) {
    return view.data == nullptr || moves_in_packs(view, p, channels, 4, 4);
  };
  return p.dtype == Dtype::kFloat32 && launch.sweeps == 1 && p.sequences == 0 &&
         p.B <= kMaxGridYZ && p.H <= kMaxGridX && moves_in_packs(p, grads) && fits(grads.dv, p.V) &&
         fits(grads.dgate, p.V) && fits(grads.dq, p.K) && fits(grads.dk, p.K) &&
         fits_index(p.initial_state) && fits_index(grads.dfinal_state) &&
         fits_index(grads.dinitial_state);
}

template <class Columns, class Rows>
cudaError_t launch_both(const Params& p, const Gradients& grads, int64_t sweep_steps,
                        cudaStream_t stream) {
  const int warps = backward_warps<Columns>(sweep_steps);
  const dim3 grid(p.H, p.B, owned_tiles<Columns>(p) + owned_tiles<Rows>(p));
  const int shared = std::max(backward_shared<Columns>(warps), backward_shared<Rows>(warps));
  simt_backward_both<Columns, Rows>
      <<<grid, warps * 32, shared, stream>>>(backward_arguments<int32_t>(p, grads));
  return cudaGetLastError();
}

template <typename Accum>
struct BackwardKernels {
  // As many steps a lane as registers hold. double has Tile64 alone.
  static constexpr int kSteps = sizeof(Accum) == 8 ? 4 : 8;
  template <Own kOwn>
  using Tile32 = BackwardTraits<Accum, kOwn, false, 8, 4, 2, 1, kSteps>;
  template <Own kOwn>
  using Tile64 = BackwardTraits<Accum, kOwn, false, 16, 4, 1, 1, kSteps>;
  template <Own kOwn>
  using Tile128 = BackwardTraits<Accum, kOwn, false, 32, 4, 1, 1, kSteps>;
  // At B * H = 8 and K = V = 24 these are 96 blocks, fewer than an H200's 132 processors.
  template <Own kOwn>
  using Small24 = BackwardTraits<float, kOwn, true, 8, 3, 2, 2, 8>;
  template <Own kOwn>
  using Small32 = BackwardTraits<float, kOwn, true, 8, 4, 2, 1, 8>;

  // One launch: the summed axis fits a tile.
  template <Own kOwn>
  static cudaError_t launch_tile(const Params& p, const Gradients& grads,
                                 const BackwardLaunch& launch, bool summarize,
                                 cudaStream_t stream) {
    const int64_t summed = kOwn == Own::kColumns ? p.K : p.V;
    if constexpr (sizeof(Accum) == 4) {
      if (summed <= 32) return launch_kind<Tile32<kOwn>>(p, grads, launch, summarize, stream);
      if (summed > 64) return launch_kind<Tile128<kOwn>>(p, grads, launch, summarize, stream);
    }
    return launch_kind<Tile64<kOwn>>(p, grads, launch, summarize, stream);
  }

  template <class Traits>
  static cudaError_t launch_kind(const Params& p, const Gradients& grads,
                                 const BackwardLaunch& launch, bool summarize,
                                 cudaStream_t stream) {
    if constexpr (Traits::kColumns) {
      if (summarize) {
        return launch_blocks<Traits>(simt_summarize_sweeps<Traits>, p, grads, launch, stream);
      }
    }
    return launch_blocks<Traits>(simt_backward<Traits>, p, grads, launch, stream);
  }

  // Slices of the summed axis, one after the other.
  template <Own kOwn>
  static cudaError_t launch_all(const Params& p, const Gradients& grads, BackwardLaunch launch,
                                bool summarize, cudaStream_t stream) {
    const int accum = sizeof(Accum);
    const int element = size_of(p.dtype);
    const int64_t all = kOwn == Own::kColumns ? p.K : p.V;
    const int64_t most = max_rows(p.dtype);
    for (int64_t first = 0; first < all; first += most) {
      const int64_t count = std::min(most, all - first);
      launch.slice = Slice{first > 0, first + count >= all};
      Params part = p;
      Gradients part_grads = grads;
      if (kOwn == Own::kColumns) {
        launch.row = first;
        part = slice_rows(p, first, count);
        part_grads.dfinal_state = skip(grads.dfinal_state, accum, 0, 0, first, 0);
        part_grads.dinitial_state = skip(grads.dinitial_state, accum, 0, 0, first, 0);
      } else {
        launch.column = first;
        part = slice_columns(p, first, count);
        part_grads.dfinal_state = skip(grads.dfinal_state, accum, 0, 0, 0, first);
        part_grads.dy = skip(grads.dy, element, 0, 0, 0, first);
      }
      const cudaError_t error = launch_tile<kOwn>(part, part_grads, launch, summarize, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  static cudaError_t launch(const Params& p, const Gradients& grads, BackwardLaunch launch,
                            cudaStream_t stream) {
    const bool columns = grads.dv.data != nullptr || grads.dgate.data != nullptr ||
                         grads.dinitial_state.data != nullptr;
    const bool rows = grads.dq.data != nullptr || grads.dk.data != nullptr;
    const int64_t most = std::max(p.K, p.V);
    if constexpr (sizeof(Accum) == 4) {
      if (columns && rows && most <= 32 && is_small(p, grads, launch)) {
        if (most <= 24)
          return launch_both<Small24<Own::kColumns>, Small24<Own::kRows>>(
              p, grads, launch.sweep_steps, stream);
        return launch_both<Small32<Own::kColumns>, Small32<Own::kRows>>(p, grads,
                                                                        launch.sweep_steps, stream);
      }
    }
    cudaError_t error = cudaSuccess;
    if (launch.sweeps > 1) {
      error = launch_all<Own::kColumns>(p, grads, launch, true, stream);
      if (error != cudaSuccess) return error;
      const int64_t pairs = (p.borders != nullptr ? p.sequences : p.B) * p.H;
      const int64_t threads = pairs * p.K * p.V;
      chain_sweeps<Accum><<<(threads + 127) / 128, 128, 0, stream>>>(
          backward_arguments<int64_t>(p, grads), launch, pairs);
      error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
    if (columns) error = launch_all<Own::kColumns>(p, grads, launch, false, stream);
    if (rows && error == cudaSuccess) {
      std::swap(launch.partial[0], launch.partial[2]);
      std::swap(launch.partial[1], launch.partial[3]);
      error = launch_all<Own::kRows>(p, grads, launch, false, stream);
    }
    return error;
  }
};

// ---- Decode step.

template <class Traits>
cudaError_t launch_step_tiles(const StepParams& p, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>((p.V + Traits::kTile - 1) / Traits::kTile);
  for (int64_t batch = 0; batch < p.B; batch += kMaxGridYZ) {
    for (int64_t head = 0; head < p.H; head += kMaxGridYZ) {
      const dim3 grid(tiles, std::min(p.H - head, kMaxGridYZ), std::min(p.B - batch, kMaxGridYZ));
      decode_step<Traits><<<grid, kStepThreads, 0, stream>>>(p, head, batch);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

// Wide tiles read long pieces of memory; narrow ones bring few heads to more processors. Measured
// on an H200, bfloat16 beside a float32 state, us in a graph: (64, 16, 128, 128) with two blocks on
// a multiprocessor 35.2, with three 36.5; (64, 16, 64, 64), where half of a block's loads have no
// row, 12.7 and 11.4; (1, 16, 128, 128) in tiles of 16, 32 and 64 columns 2.5, 2.4 and 2.8.
template <typename State, typename Stored, typename StoredGate>
cudaError_t launch_step(const StepParams& p, int processors, cudaStream_t stream) {
  constexpr int kPack = 16 / sizeof(State);
  constexpr int kWide = 16;
  constexpr int kNarrow = 8;
  constexpr int kBlocks = sizeof(State) == 2 ? 2 : 3;  // packs of eight columns want more registers
  bool packed = reinterpret_cast<uintptr_t>(p.state.data) % 16 == 0 && p.V % kPack == 0 &&
                p.state.stride[3] == 1;
  const int64_t sizes[3] = {p.pool, p.H, p.K};
  for (int axis = 0; axis < 3; ++axis)
    packed = packed && (sizes[axis] == 1 || p.state.stride[axis] % kPack == 0);
  if (!packed)
    return launch_step_tiles<StepTraits<State, Stored, StoredGate, kNarrow, 128, 0>>(p, stream);
  const int64_t wide_blocks = p.B * p.H * ((p.V + kWide * kPack - 1) / (kWide * kPack));
  if (wide_blocks < 2 * processors)
    return launch_step_tiles<StepTraits<State, Stored, StoredGate, kNarrow, 128, kBlocks>>(p,
                                                                                           stream);
  if (p.K <= 64)
    return launch_step_tiles<StepTraits<State, Stored, StoredGate, kWide, 64, kBlocks>>(p, stream);
  return launch_step_tiles<StepTraits<State, Stored, StoredGate, kWide, 128, 2>>(p, stream);
}

// q, k and v are half-precision numbers.
template <typename State>
cudaError_t launch_step_of_half(const StepParams& p, int processors, cudaStream_t stream) {
  if (size_of(p.gate_dtype) == 2)
    return launch_step<State, uint16_t, uint16_t>(p, processors, stream);
  return launch_step<State, uint16_t, float>(p, processors, stream);
}

// Where the SIMT backward's temporaries lie in its scratch memory, in elements of the state's type.
struct BackwardScratch {
  int64_t states, flows, decays, columns[2], rows[2], total;

  explicit BackwardScratch(const Params& p) {
    const int64_t sweeps = backward_sweeps(p);
    const int64_t states_size = sweeps > 1 ? p.B * p.H * sweeps * p.K * p.V : 0;
    const int64_t columns_size = p.K > max_rows(p.dtype) ? p.B * p.T * p.H * p.V : 0;
    const int64_t rows_size = p.V > max_rows(p.dtype) ? p.B * p.T * p.H * p.K : 0;
    states = 0;
    flows = states + states_size;
    decays = flows + states_size;
    columns[0] = decays + (sweeps > 1 ? p.B * p.H * sweeps * p.V : 0);
    columns[1] = columns[0] + columns_size;
    rows[0] = columns[1] + columns_size;
    rows[1] = rows[0] + rows_size;
    total = rows[1] + rows_size;
  }
};

}  // namespace

// ---- The ways in. This source compiles in one piece or, to save time, as objects, each with
// GATED_DELTA_PART set to a number: 1 has the SIMT forward, marks and the decode step, 2 to 4 the
// tensor-core forward for a dtype each, 5 the SIMT backward, 6 to 8 the tensor-core backward.

#ifndef GATED_DELTA_PART
#define GATED_DELTA_IN_PART(number) 1
#else
#define GATED_DELTA_IN_PART(number) (GATED_DELTA_PART == number)
#endif

// For one dtype of q each. The forward also leaves checkpoints in p.states if it isn't null, and
// without p.y nothing but these. The backward takes them from there, or from scratch.
cudaError_t launch_tensor_float16(const Params& p, cudaStream_t stream);
cudaError_t launch_tensor_bfloat16(const Params& p, cudaStream_t stream);
cudaError_t launch_tensor_float32(const Params& p, cudaStream_t stream);
cudaError_t launch_gradients_float16(const Params& p, const Gradients& grads, void* scratch,
                                     cudaStream_t stream);
cudaError_t launch_gradients_bfloat16(const Params& p, const Gradients& grads, void* scratch,
                                      cudaStream_t stream);
cudaError_t launch_gradients_float32(const Params& p, const Gradients& grads, void* scratch,
                                     cudaStream_t stream);

cudaError_t launch_tensor_walk(const Params& p, cudaStream_t stream);
bool takes_tensor_cores(const Params& p);
bool takes_tensor_gradients(const Params& p);
Dtype gate_gradient_dtype(const Params& p);

#if GATED_DELTA_IN_PART(1)
// Bytes of memory for what launch_marks leaves for packed sequences.
int64_t marks_bytes(const Params& p) {
  return (p.sequences + 1) * 8 + (p.T + 31) / 32 * 4;
}

// Makes packed sequences known to the kernels in one of their two forms: the first of a call's
// launches, forward or `back`. `states`: the call has or wants states, or their gradients.
cudaError_t launch_marks(Params& p, const void* offsets, int64_t stride, bool is_long, bool back,
                         bool states, void* memory, cudaStream_t stream) {
  int64_t* const borders = static_cast<int64_t*>(memory);
  uint32_t* starts = reinterpret_cast<uint32_t*>(borders + p.sequences + 1);
  // Without states sequences can run as one row, and no block's work depends on their lengths. Only
  // SIMT kernels with long sequences, 128 steps on average, do better with each for itself.
  const auto on_tensor_cores = [&] {
    return back ? takes_tensor_gradients(p) : takes_tensor_cores(p);
  };
  const bool as_row = !states && (p.T < 128 * p.sequences || on_tensor_cores());
  if (!as_row) {
    p.borders = borders;
    starts = nullptr;
    // All sequences lie in the one batch; states have one for each.
    for (View<int64_t>* view : {&p.q, &p.k, &p.v, &p.gate, &p.y}) view->stride[0] = 0;
  }
  p.starts = starts;
  p.end = borders + p.sequences;
  const int64_t threads = std::max(p.sequences + 1, starts == nullptr ? 0 : p.T);
  const int64_t blocks = std::min<int64_t>((threads + 255) / 256, 65535);
  mark_sequences<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
      offsets, stride, is_long, p.sequences, p.T, borders, starts);
  return cudaGetLastError();
}

// Zeros in y, or in the gradients if there are any, at steps that are nobody's: the last launch.
cudaError_t launch_tails(const Params& p, const Gradients* grads, cudaStream_t stream) {
  Tails tails;
  int count = 0;
  const auto add = [&](const View<int64_t>& view, int64_t channels, int element) {
    Tail& tail = tails.at[count++];
    if (view.data == nullptr) return;
    tail.data = static_cast<char*>(view.data);
    for (int axis = 0; axis < 3; ++axis) tail.stride[axis] = view.stride[axis + 1] * element;
    tail.heads = p.H;
    tail.channels = channels;
    tail.element = element;
  };
  const int element = size_of(p.dtype);
  if (grads == nullptr) {
    add(p.y, p.V, element);
  } else {
    add(grads->dq, p.K, element);
    add(grads->dk, p.K, element);
    add(grads->dv, p.V, element);
    add(grads->dgate, p.V, size_of(gate_gradient_dtype(p)));
  }
  clear_tails<<<256, 256, 0, stream>>>(tails, p.T, p.end);
  return cudaGetLastError();
}

Kernels chosen_kernels = Kernels::kByRule;

bool takes_tensor_cores(const Params& p) {
  Device device;
  return device.read() == cudaSuccess && plan_tensor(p, device).segments > 0;
}

cudaError_t launch_tensor_walk(const Params& p, cudaStream_t stream) {
  if (p.dtype == Dtype::kFloat16) return launch_tensor_float16(p, stream);
  if (p.dtype == Dtype::kBFloat16) return launch_tensor_bfloat16(p, stream);
  return launch_tensor_float32(p, stream);
}

// Bytes of scratch memory that launch_forward needs on the current device.
int64_t forward_scratch_bytes(const Params& p) {
  Device device;
  if (device.read() != cudaSuccess) return 0;
  return plan_tensor(p, device).end_bytes;
}

// Does launch_forward need p.partial on the current device? Where SIMT kernels take K in slices.
bool forward_needs_partial(const Params& p) {
  if (p.K <= max_rows(p.dtype)) return false;
  Device device;
  return device.read() != cudaSuccess || plan_tensor(p, device).segments == 0;
}

// Runs the forward operator on the current device. Nothing in `p` may be empty but K; T >= 1.
cudaError_t launch_forward(const Params& p, cudaStream_t stream) {
  Device device;
  cudaError_t error = device.read();
  if (error != cudaSuccess) return error;
  const TensorPlan plan = plan_tensor(p, device);
  if (plan.segments > 0) {
    return launch_tensor_walk(p, stream);
  }
  const int processors = device.processors;
  const int64_t rows = max_rows(p.dtype);
  const Params whole = with_sequences_as_batches(p);
  for (int64_t row = 0; error == cudaSuccess && (row == 0 || row < p.K); row += rows) {
    const Params part = slice_rows(whole, row, std::min(rows, p.K - row));
    const Slice slice{row > 0, row + rows >= p.K};
    switch (p.dtype) {
      case Dtype::kFloat32:
        error = FloatTraits<float>::launch(part, slice, processors, stream);
        break;
      case Dtype::kFloat16:
        error = FloatTraits<__half>::launch(part, slice, processors, stream);
        break;
      case Dtype::kBFloat16:
        error = FloatTraits<__nv_bfloat16>::launch(part, slice, processors, stream);
        break;
      case Dtype::kFloat64:
        error = DoubleTraits::launch(part, slice, processors, stream);
        break;
    }
  }
  return error;
}
#endif

#if GATED_DELTA_IN_PART(1)
// One decode step on the current device. B, H and V are at least 1.
cudaError_t launch_step(const StepParams& p, cudaStream_t stream) {
  Device device;
  const cudaError_t error = device.read();
  if (error != cudaSuccess) return error;
  switch (p.state_dtype) {
    case Dtype::kFloat32:
      if (size_of(p.dtype) == 4)
        return launch_step<float, float, float>(p, device.processors, stream);
      return launch_step_of_half<float>(p, device.processors, stream);
    case Dtype::kFloat16:
      return launch_step_of_half<__half>(p, device.processors, stream);
    case Dtype::kBFloat16:
      return launch_step_of_half<__nv_bfloat16>(p, device.processors, stream);
    default:
      return launch_step<double, double, double>(p, device.processors, stream);
  }
}
#endif

#if GATED_DELTA_IN_PART(2)
cudaError_t launch_tensor_float16(const Params& p, cudaStream_t stream) {
  return launch_walks<__half>(p, stream);
}
#endif

#if GATED_DELTA_IN_PART(3)
cudaError_t launch_tensor_bfloat16(const Params& p, cudaStream_t stream) {
  return launch_walks<__nv_bfloat16>(p, stream);
}
#endif

#if GATED_DELTA_IN_PART(4)
cudaError_t launch_tensor_float32(const Params& p, cudaStream_t stream) {
  return launch_walks<float>(p, stream);
}
#endif

#if GATED_DELTA_IN_PART(5)
namespace {

int64_t gradient_scratch_bytes(const Params& p) {
  if (!worth_tensor_gradients(p)) return 0;  // quickly: small calls come here too
  Device device;
  return device.read() == cudaSuccess ? GradientScratch(p, device).total : 0;
}

}  // namespace

bool takes_tensor_gradients(const Params& p) {
  return gradient_scratch_bytes(p) > 0;
}

// Bytes of scratch memory that launch_backward needs on the current device.
int64_t backward_scratch_bytes(const Params& p) {
  const int64_t bytes = gradient_scratch_bytes(p);
  if (bytes > 0) return bytes;
  return BackwardScratch(p).total * (p.dtype == Dtype::kFloat64 ? 8 : 4);
}

// Bytes of p.states that the forward should leave for the backward: where both run on tensor cores,
// and the checkpoints are at most half as large as q, k, v and the gate.
int64_t kept_state_bytes(const Params& p) {
  Device device;
  const int64_t gates = p.gate.stride[3] == 0 ? 1 : p.V;
  const int64_t operands =
      (2 * p.K / p.group + p.V) * size_of(p.dtype) + gates * size_of(p.gate_dtype);
  if (p.borders != nullptr || p.K > kMostKeptRows ||
      2 * p.K * p.V * size_of(p.dtype) > kCheckpointSteps * operands ||
      !takes_tensor_gradients(p) || !takes_tensor_cores(p) || device.read() != cudaSuccess) {
    return 0;
  }
  return GradientScratch(p, device).state_bytes;
}

// The dtype in which the backward writes the gate's gradient.
Dtype gate_gradient_dtype(const Params& p) {
  if (takes_tensor_gradients(p)) return p.gate_dtype;
  return p.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
}

// Does the backward want this dy as a contiguous copy? Of zeros, where there is none.
bool backward_wants_copy(const Params& p, const View<int64_t>& dy) {
  if (!takes_tensor_gradients(p)) return false;
  return dy.data == nullptr || !moves_in_chunks(dy, p, size_of(p.dtype));
}

// Computes the gradients that `wanted` has a place for. Nothing may be empty.
cudaError_t launch_backward(const Params& p, const Gradients& wanted, void* scratch,
                            cudaStream_t stream) {
  if (takes_tensor_gradients(p)) {
    // States first, unless the forward left them: its kernels are in other parts of this source.
    Device device;
    cudaError_t error = device.read();
    if (error == cudaSuccess && p.states == nullptr) {
      const GradientScratch at(p, device);
      Params ahead = p;
      ahead.y = View<int64_t>();
      ahead.final_state = View<int64_t>();
      ahead.states = static_cast<char*>(scratch) + at.states;
      ahead.scratch = static_cast<char*>(scratch) + at.segments;
      error = launch_tensor_walk(ahead, stream);
    }
    if (error != cudaSuccess) return error;
    switch (p.dtype) {
      case Dtype::kFloat16:
        return launch_gradients_float16(p, wanted, scratch, stream);
      case Dtype::kBFloat16:
        return launch_gradients_bfloat16(p, wanted, scratch, stream);
      default:
        return launch_gradients_float32(p, wanted, scratch, stream);
    }
  }
  const BackwardScratch at(p);
  Gradients grads = wanted;
  if (p.borders != nullptr) {
    for (View<int64_t>* view : {&grads.dy, &grads.dq, &grads.dk, &grads.dv, &grads.dgate})
      view->stride[0] = 0;
  }
  const int accum = p.dtype == Dtype::kFloat64 ? 8 : 4;
  const auto place = [&](int64_t element) { return static_cast<char*>(scratch) + element * accum; };
  const auto partial = [&](int64_t element, int64_t channels) {
    View<int64_t> view;
    view.data = place(element);
    view.stride[0] = p.T * p.H * channels;
    view.stride[1] = p.H * channels;
    view.stride[2] = channels;
    view.stride[3] = 1;
    return view;
  };
  BackwardLaunch launch;
  launch.sweeps = backward_sweeps(p);
  launch.sweep_steps = backward_sweep_steps(p);
  while ((int64_t{1} << launch.shift) < launch.sweep_steps) ++launch.shift;
  launch.states = place(at.states);
  launch.flows = place(at.flows);
  launch.decays = place(at.decays);
  launch.all_rows = p.K;
  launch.all_columns = p.V;
  for (int which = 0; which < 2; ++which) {
    launch.partial[which] = partial(at.columns[which], p.V);
    launch.partial[which + 2] = partial(at.rows[which], p.K);
  }
  for (View<int64_t>& view : launch.partial) {
    if (p.borders != nullptr) view.stride[0] = 0;
  }
  if (p.dtype == Dtype::kFloat64) return BackwardKernels<double>::launch(p, grads, launch, stream);
  return BackwardKernels<float>::launch(p, grads, launch, stream);
}
#endif

#if GATED_DELTA_IN_PART(6)
cudaError_t launch_gradients_float16(const Params& p, const Gradients& grads, void* scratch,
                                     cudaStream_t stream) {
  return launch_gradients<__half>(p, grads, scratch, stream);
}
#endif

#if GATED_DELTA_IN_PART(7)
cudaError_t launch_gradients_bfloat16(const Params& p, const Gradients& grads, void* scratch,
                                      cudaStream_t stream) {
  return launch_gradients<__nv_bfloat16>(p, grads, scratch, stream);
}
#endif

#if GATED_DELTA_IN_PART(8)
cudaError_t launch_gradients_float32(const Params& p, const Gradients& grads, void* scratch,
                                     cudaStream_t stream) {
  return launch_gradients<float>(p, grads, scratch, stream);
}
#endif

}  // namespace gated_delta
"""

CPP_SOURCE = SHARED_SOURCE + r"""
// This source compiles in one piece or, to save time, as objects with GATED_DELTA_PART set to 2,
// the CPU kernel, 1, the torch side, and 3, the short way from Python: they come in this order.
#ifndef GATED_DELTA_PART
#define GATED_DELTA_IN_PART(number) 1
#else
#define GATED_DELTA_IN_PART(number) (GATED_DELTA_PART == number)
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace gated_delta {

// Forward without `grads`, backward with them.
void run_on_cpu(const Params& p, const Gradients* grads);

void step_on_cpu(const StepParams& p);

}  // namespace gated_delta

#if GATED_DELTA_IN_PART(2)
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace gated_delta {
namespace {

// ======================================== CPU kernel ==========================================
//
// A work item is one (batch, head) and a tile of its columns, as wide as one vector. It walks over
// chunks of time: the chunk's operands are gathered into plain buffers of the state's type,
// whatever their dtype and strides, and `Advance` runs the recurrence on them, four steps for every
// load and store of the state. Backward an item has all columns, one tile after the other: it keeps
// the state before each chunk, then walks back, and `Retreat` makes a chunk's states again.

constexpr int64_t kChunkSteps = 32;
constexpr int64_t kUnrolledSteps = 4;
constexpr int64_t kVectorBytes = 64;

// Rows whose products are summed before they join the sum over all rows: the error of a sum grows
// with its length.
constexpr int64_t kSummedRows = 16;

template <typename Accum>
struct Chunk {
  static constexpr int64_t kColumns = kVectorBytes / sizeof(Accum);
  using Column __attribute__((vector_size(kVectorBytes), aligned(alignof(Accum)), may_alias)) =
      Accum;

  int64_t rows = 0;
  int64_t steps = 0;         // a multiple of kUnrolledSteps
  const Accum* q = nullptr;  // (steps, rows), a step every q_stride
  const Accum* k = nullptr;  // (steps, rows), a step every k_stride
  int64_t q_stride = 0;
  int64_t k_stride = 0;
  const Accum* v = nullptr;  // (steps, kColumns)
  const Accum* gate = nullptr;
  Accum* y = nullptr;
  Accum* state = nullptr;  // (rows, kColumns)
};

// The recurrence over one chunk. Works on copies of the chunk's fields: a store to the state could
// change the fields for all that the compiler knows.
template <typename Accum>
struct Advance {
  const Chunk<Accum>& chunk;

  inline __attribute__((always_inline)) void operator()() const {
    using Column = typename Chunk<Accum>::Column;
    const int64_t rows = chunk.rows;
    Column* const state = reinterpret_cast<Column*>(chunk.state);
    for (int64_t t = 0; t < chunk.steps; t += kUnrolledSteps) {
      const Accum* q[kUnrolledSteps];
      const Accum* k[kUnrolledSteps];
      Column v[kUnrolledSteps];
      Column gate[kUnrolledSteps];
      Column y[kUnrolledSteps];
#pragma GCC unroll 4
      for (int64_t n = 0; n < kUnrolledSteps; ++n) {
        q[n] = chunk.q + (t + n) * chunk.q_stride;
        k[n] = chunk.k + (t + n) * chunk.k_stride;
        v[n] = reinterpret_cast<const Column*>(chunk.v)[t + n];
        gate[n] = reinterpret_cast<const Column*>(chunk.gate)[t + n];
        y[n] = Column{};
      }
      for (int64_t block = 0; block < rows; block += kSummedRows) {
        const int64_t block_end = block + kSummedRows < rows ? block + kSummedRows : rows;
        Column sum[kUnrolledSteps] = {};
        for (int64_t i = block; i < block_end; ++i) {
          Column s = state[i];
#pragma GCC unroll 4
          for (int64_t n = 0; n < kUnrolledSteps; ++n) {
            s = gate[n] * s + k[n][i] * v[n];
            sum[n] += q[n][i] * s;
          }
          state[i] = s;
        }
#pragma GCC unroll 4
        for (int64_t n = 0; n < kUnrolledSteps; ++n) y[n] += sum[n];
      }
#pragma GCC unroll 4
      for (int64_t n = 0; n < kUnrolledSteps; ++n) reinterpret_cast<Column*>(chunk.y)[t + n] = y[n];
    }
  }
};

// One chunk backward, with R_t = scale * q_t dy_t^T + flow and flow = R_{t+1} diag(gate_{t+1}):
//   dq_t = scale * S_t dy_t    dk_t = R_t v_t    dv_t = R_t^T k_t    dgate_t[j] = sum_i S_{t-1} R_t
template <typename Accum>
struct Retreat {
  const Chunk<Accum>& chunk;
  const Accum* dy;  // (steps, kColumns), times scale
  Accum* states;    // (steps + 1, rows, kColumns); the first is the state before the chunk
  Accum* flow;      // (rows, kColumns)
  Accum* dq;        // (steps, rows), added to
  Accum* dk;        // (steps, rows), added to
  Accum* dv;        // (steps, kColumns)
  Accum* dgate;     // (steps, kColumns)

  inline __attribute__((always_inline)) void operator()() const {
    using Column = typename Chunk<Accum>::Column;
    constexpr int64_t kColumns = Chunk<Accum>::kColumns;
    const int64_t rows = chunk.rows;
    const int64_t steps = chunk.steps;
    Column* const all_states = reinterpret_cast<Column*>(states);
    Column* const all_flows = reinterpret_cast<Column*>(flow);
    for (int64_t t = 0; t < steps; ++t) {
      const Accum* k = chunk.k + t * chunk.k_stride;
      const Column v = reinterpret_cast<const Column*>(chunk.v)[t];
      const Column gate = reinterpret_cast<const Column*>(chunk.gate)[t];
      const Column* before = all_states + t * rows;
      for (int64_t i = 0; i < rows; ++i) {
        all_states[(t + 1) * rows + i] = gate * before[i] + k[i] * v;
      }
    }
    for (int64_t t = steps - 1; t >= 0; --t) {
      const Accum* q = chunk.q + t * chunk.q_stride;
      const Accum* k = chunk.k + t * chunk.k_stride;
      const Column v = reinterpret_cast<const Column*>(chunk.v)[t];
      const Column gate = reinterpret_cast<const Column*>(chunk.gate)[t];
      const Column dy_t = reinterpret_cast<const Column*>(dy)[t];
      const Column* before = all_states + t * rows;
      const Column* after = before + rows;
      Column dv_t = {};
      Column dgate_t = {};
      for (int64_t i = 0; i < rows; ++i) {
        const Column r = q[i] * dy_t + all_flows[i];
        dv_t += k[i] * r;
        dgate_t += before[i] * r;
        const Column dq_terms = after[i] * dy_t;
        const Column dk_terms = r * v;
        Accum dq_sum = 0;
        Accum dk_sum = 0;
        for (int64_t m = 0; m < kColumns; ++m) {
          dq_sum += dq_terms[m];
          dk_sum += dk_terms[m];
        }
        dq[t * rows + i] += dq_sum;
        dk[t * rows + i] += dk_sum;
        all_flows[i] = r * gate;
      }
      reinterpret_cast<Column*>(dv)[t] = dv_t;
      reinterpret_cast<Column*>(dgate)[t] = dgate_t;
    }
  }
};

// One binary for every x86-64 machine: the widest vectors that the processor has.
#if defined(__x86_64__)
template <class Work>
__attribute__((target("avx512f"))) void run_avx512(const Work& work) {
  work();
}

template <class Work>
__attribute__((target("avx2,fma"))) void run_avx2(const Work& work) {
  work();
}
#endif

template <class Work>
void run_widest(const Work& work) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return run_avx512(work);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return run_avx2(work);
#endif
  work();
}

template <typename T>
T* element_of(const View<int64_t>& view, int64_t a, int64_t b, int64_t c, int64_t d) {
  return static_cast<T*>(view.data) + a * view.stride[0] + b * view.stride[1] + c * view.stride[2] +
         d * view.stride[3];
}

template <typename Element, typename Accum>
void gather(const Element* from, int64_t stride, int64_t count, Accum* to) {
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Accum>(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Accum>(from[i * stride]);
  }
}

// One thread's buffers, and its way through the work items.
template <typename Element, typename Gate, typename Accum>
class Walker {
 public:
  explicit Walker(const Params& p)
      : p_(p), q_(kChunkSteps * p.K), k_(kChunkSteps * p.K), state_(p.K * kColumns) {}

  void walk(int64_t batch, int64_t head, int64_t column) {
    const int64_t columns = std::min(kColumns, p_.V - column);
    find_steps(batch);
    load_state(p_.initial_state, batch, head, column, columns, state_.data());
    for (int64_t start = first_; start < end_; start += kChunkSteps) {
      const Chunk<Accum> chunk = load_chunk(batch, start, head, column);
      run_widest(Advance<Accum>{chunk});
      const int64_t steps = std::min(kChunkSteps, end_ - start);
      for (int64_t t = 0; t < steps; ++t) {
        Element* y = element_of<Element>(p_.y, batch, start + t, head, column);
        const Accum scale = static_cast<Accum>(p_.scale);
        for (int64_t m = 0; m < columns; ++m) {
          y[m] = static_cast<Element>(scale * y_[t * kColumns + m]);
        }
      }
    }
    store_state(state_.data(), p_.final_state, batch, head, column, columns);
  }

  // All columns of one (batch, head): dq and dk are sums over them.
  void walk_back(const Gradients& grads, int64_t batch, int64_t head) {
    find_steps(batch);
    const int64_t chunks = (end_ - first_ + kChunkSteps - 1) / kChunkSteps;
    std::vector<Accum> dq(chunks * kChunkSteps * p_.K);
    std::vector<Accum> dk(chunks * kChunkSteps * p_.K);
    std::vector<Accum> before(chunks * p_.K * kColumns);  // the states before the chunks
    std::vector<Accum> states((kChunkSteps + 1) * p_.K * kColumns);
    std::vector<Accum> flow(p_.K * kColumns);
    Accum dy[kChunkSteps * kColumns];
    Accum dv[kChunkSteps * kColumns];
    Accum dgate[kChunkSteps * kColumns];
    for (int64_t column = 0; column < p_.V; column += kColumns) {
      const int64_t columns = std::min(kColumns, p_.V - column);
      load_state(p_.initial_state, batch, head, column, columns, state_.data());
      for (int64_t n = 0; n < chunks; ++n) {
        std::copy(state_.begin(), state_.end(), before.begin() + n * p_.K * kColumns);
        if (n + 1 == chunks) break;
        const Chunk<Accum> chunk = load_chunk(batch, first_ + n * kChunkSteps, head, column);
        run_widest(Advance<Accum>{chunk});
      }
      load_state(grads.dfinal_state, batch, head, column, columns, flow.data());
      for (int64_t n = chunks - 1; n >= 0; --n) {
        const int64_t start = first_ + n * kChunkSteps;
        const int64_t steps = std::min(kChunkSteps, end_ - start);
        const Chunk<Accum> chunk = load_chunk(batch, start, head, column);
        std::fill_n(dy, kChunkSteps * kColumns, Accum{0});
        for (int64_t t = 0; grads.dy.data != nullptr && t < steps; ++t) {
          gather(element_of<const Element>(grads.dy, batch, start + t, head, column),
                 grads.dy.stride[3], columns, dy + t * kColumns);
        }
        for (Accum& each : dy) each *= static_cast<Accum>(p_.scale);
        std::copy_n(before.begin() + n * p_.K * kColumns, p_.K * kColumns, states.begin());
        const int64_t at = n * kChunkSteps * p_.K;
        run_widest(
            Retreat<Accum>{chunk, dy, states.data(), flow.data(), &dq[at], &dk[at], dv, dgate});
        for (int64_t t = 0; t < steps; ++t) {
          store(dv + t * kColumns, grads.dv, batch, start + t, head, column, columns);
          if (grads.dgate.data == nullptr) continue;
          Accum* out = element_of<Accum>(grads.dgate, batch, start + t, head, column);
          for (int64_t m = 0; m < columns; ++m) {
            out[m] = dgate[t * kColumns + m] * (p_.log_gate ? gate_[t * kColumns + m] : 1);
          }
        }
      }
      store_state(flow.data(), grads.dinitial_state, batch, head, column, columns);
    }
    for (int64_t t = first_; t < end_; ++t) {
      store(&dq[(t - first_) * p_.K], grads.dq, batch, t, head, 0, p_.K);
      store(&dk[(t - first_) * p_.K], grads.dk, batch, t, head, 0, p_.K);
    }
  }

 private:
  static constexpr int64_t kColumns = Chunk<Accum>::kColumns;

  // Of packed sequences each is a batch of its own, whose steps lie in the one row.
  void find_steps(int64_t batch) {
    first_ = p_.borders == nullptr ? 0 : p_.borders[batch];
    end_ = p_.borders == nullptr ? p_.T : p_.borders[batch + 1];
  }

  void load_state(const View<int64_t>& view, int64_t batch, int64_t head, int64_t column,
                  int64_t columns, Accum* to) const {
    std::fill_n(to, p_.K * kColumns, Accum{0});
    for (int64_t i = 0; view.data != nullptr && i < p_.K; ++i) {
      gather(element_of<const Accum>(view, batch, head, i, column), view.stride[3], columns,
             to + i * kColumns);
    }
  }

  void store_state(const Accum* from, const View<int64_t>& view, int64_t batch, int64_t head,
                   int64_t column, int64_t columns) const {
    for (int64_t i = 0; view.data != nullptr && i < p_.K; ++i) {
      std::copy_n(from + i * kColumns, columns, element_of<Accum>(view, batch, head, i, column));
    }
  }

  void store(const Accum* from, const View<int64_t>& view, int64_t batch, int64_t t, int64_t head,
             int64_t channel, int64_t count) const {
    if (view.data == nullptr) return;
    Element* to = element_of<Element>(view, batch, t, head, channel);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Element>(from[i]);
  }

  // The chunk that begins at step `start`, its state in state_. Where there is no step or column
  // the value is 0 and the gate 1, which leaves a state as it is.
  Chunk<Accum> load_chunk(int64_t batch, int64_t start, int64_t head, int64_t column) {
    const int64_t steps = std::min(kChunkSteps, end_ - start);
    const int64_t columns = std::min(kColumns, p_.V - column);
    Chunk<Accum> chunk;
    chunk.rows = p_.K;
    chunk.steps = (steps + kUnrolledSteps - 1) / kUnrolledSteps * kUnrolledSteps;
    const int64_t row_head = head / p_.group;
    chunk.q = load_rows(p_.q, batch, start, row_head, steps, chunk.steps, q_, chunk.q_stride);
    chunk.k = load_rows(p_.k, batch, start, row_head, steps, chunk.steps, k_, chunk.k_stride);
    chunk.v = v_;
    chunk.gate = gate_;
    chunk.y = y_;
    chunk.state = state_.data();
    std::fill_n(v_, kChunkSteps * kColumns, Accum{0});
    std::fill_n(gate_, kChunkSteps * kColumns, Accum{1});
    for (int64_t t = 0; t < steps; ++t) {
      gather(element_of<const Element>(p_.v, batch, start + t, head, column), p_.v.stride[3],
             columns, v_ + t * kColumns);
      Accum* gate = gate_ + t * kColumns;
      gather(element_of<const Gate>(p_.gate, batch, start + t, head, column), p_.gate.stride[3],
             columns, gate);
      for (int64_t m = 0; p_.log_gate && m < columns; ++m) gate[m] = std::exp(gate[m]);
    }
    return chunk;
  }

  // The chunk's rows of q or k: where they are, if they can be used there, else a copy.
  const Accum* load_rows(const View<int64_t>& view, int64_t batch, int64_t start, int64_t head,
                         int64_t steps, int64_t padded_steps, std::vector<Accum>& buffer,
                         int64_t& stride) const {
    if constexpr (std::is_same_v<Element, Accum>) {
      if (view.stride[3] == 1 && steps == padded_steps) {
        stride = view.stride[1];
        return element_of<const Accum>(view, batch, start, head, 0);
      }
    }
    stride = p_.K;
    std::fill(buffer.begin() + steps * p_.K, buffer.begin() + padded_steps * p_.K, Accum{0});
    for (int64_t t = 0; t < steps; ++t) {
      gather(element_of<const Element>(view, batch, start + t, head, 0), view.stride[3], p_.K,
             buffer.data() + t * p_.K);
    }
    return buffer.data();
  }

  const Params& p_;
  int64_t first_ = 0;
  int64_t end_ = 0;
  std::vector<Accum> q_;
  std::vector<Accum> k_;
  std::vector<Accum> state_;
  Accum v_[kChunkSteps * kColumns];
  Accum gate_[kChunkSteps * kColumns];
  Accum y_[kChunkSteps * kColumns];
};

template <typename Element, typename Gate, typename Accum>
void run_on_cpu(const Params& p, const Gradients* grads) {
  constexpr int64_t kColumns = Chunk<Accum>::kColumns;
  const int64_t tiles = grads != nullptr ? 1 : (p.V + kColumns - 1) / kColumns;
  // A thread is worth waking for some 50 us of work. Backward, a row takes about 8 times as long.
  const int64_t steps = p.borders == nullptr ? p.T : p.borders[p.B] / p.B;
  const int64_t item = steps * p.K * (grads != nullptr ? (p.V + kColumns - 1) / kColumns * 8 : 1);
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, item));
  at::parallel_for(0, p.B * p.H * tiles, grain, [&](int64_t begin, int64_t end) {
    Walker<Element, Gate, Accum> walker(p);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t head = n / tiles;
      if (grads != nullptr) {
        walker.walk_back(*grads, head / p.H, head % p.H);
      } else {
        walker.walk(head / p.H, head % p.H, n % tiles * kColumns);
      }
    }
  });
}

// One step for one (batch, head), from plain buffers of the state's type to such a buffer.
template <typename Accum, typename State>
struct StepRows {
  const StepParams& p;
  const Accum* q;
  const Accum* k;
  const Accum* v;
  const Accum* gate;
  State* state;
  Accum* y;    // added to
  Accum* sum;  // zeros before and after

  inline __attribute__((always_inline)) void operator()() const {
    const int64_t columns = p.V;
    for (int64_t block = 0; block < p.K; block += kSummedRows) {
      advance(block, std::min(block + kSummedRows, p.K));
      for (int64_t j = 0; j < columns; ++j) {
        y[j] += sum[j];
        sum[j] = 0;
      }
    }
  }

  inline __attribute__((always_inline)) void advance(int64_t begin, int64_t end) const {
    const int64_t columns = p.V;
    const int64_t hop = p.state.stride[3];
    for (int64_t i = begin; i < end; ++i) {
      State* const row = state + i * p.state.stride[2];
      const Accum k_i = k[i];
      const Accum q_i = q[i];
      if (hop == 1) {
#pragma GCC ivdep
        for (int64_t j = 0; j < columns; ++j) {
          const Accum now = gate[j] * static_cast<Accum>(row[j]) + k_i * v[j];
          sum[j] += q_i * now;
          row[j] = static_cast<State>(now);
        }
      } else {
        for (int64_t j = 0; j < columns; ++j) {
          const Accum now = gate[j] * static_cast<Accum>(row[j * hop]) + k_i * v[j];
          sum[j] += q_i * now;
          row[j * hop] = static_cast<State>(now);
        }
      }
    }
  }
};

template <typename Element, typename Gate, typename Accum, typename State>
void step_on_cpu(const StepParams& p) {
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, p.K * p.V));
  at::parallel_for(0, p.B * p.H, grain, [&](int64_t begin, int64_t end) {
    std::vector<Accum> q(p.K);
    std::vector<Accum> k(p.K);
    std::vector<Accum> v(p.V);
    std::vector<Accum> gate(p.V);
    std::vector<Accum> y(p.V);
    std::vector<Accum> sum(p.V);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t batch = n / p.H;
      const int64_t head = n % p.H;
      int64_t row = batch;
      if (p.indices != nullptr) {
        row = p.long_indices ? static_cast<const int64_t*>(p.indices)[batch * p.index_stride]
                             : static_cast<const int32_t*>(p.indices)[batch * p.index_stride];
      }
      std::fill(y.begin(), y.end(), Accum{0});
      if (row >= 0) {
        gather(element_of<const Element>(p.q, batch, 0, head / p.group, 0), p.q.stride[3], p.K,
               q.data());
        gather(element_of<const Element>(p.k, batch, 0, head / p.group, 0), p.k.stride[3], p.K,
               k.data());
        gather(element_of<const Element>(p.v, batch, 0, head, 0), p.v.stride[3], p.V, v.data());
        gather(element_of<const Gate>(p.gate, batch, 0, head, 0), p.gate.stride[3], p.V,
               gate.data());
        for (int64_t j = 0; p.log_gate && j < p.V; ++j) gate[j] = std::exp(gate[j]);
        State* const state = element_of<State>(p.state, row, head, 0, 0);
        run_widest(StepRows<Accum, State>{p, q.data(), k.data(), v.data(), gate.data(), state,
                                          y.data(), sum.data()});
      }
      Element* const out = element_of<Element>(p.y, batch, 0, head, 0);
      for (int64_t j = 0; j < p.V; ++j)
        out[j] = static_cast<Element>(static_cast<Accum>(p.scale) * y[j]);
    }
  });
}

template <typename Element>
void step_half_on_cpu(const StepParams& p) {
  const bool float_gate = p.gate_dtype == Dtype::kFloat32;
  if (p.state_dtype == Dtype::kFloat32) {
    if (float_gate) return step_on_cpu<Element, float, float, float>(p);
    return step_on_cpu<Element, Element, float, float>(p);
  }
  if (float_gate) return step_on_cpu<Element, float, float, Element>(p);
  step_on_cpu<Element, Element, float, Element>(p);
}

template <typename Element>
void run_half_on_cpu(const Params& p, const Gradients* grads) {
  if (p.gate_dtype == Dtype::kFloat32) {
    run_on_cpu<Element, float, float>(p, grads);
  } else {
    run_on_cpu<Element, Element, float>(p, grads);
  }
}

}  // namespace

void run_on_cpu(const Params& p, const Gradients* grads) {
  switch (p.dtype) {
    case Dtype::kFloat32:
      return run_on_cpu<float, float, float>(p, grads);
    case Dtype::kFloat64:
      return run_on_cpu<double, double, double>(p, grads);
    case Dtype::kFloat16:
      return run_half_on_cpu<at::Half>(p, grads);
    case Dtype::kBFloat16:
      return run_half_on_cpu<at::BFloat16>(p, grads);
  }
}

void step_on_cpu(const StepParams& p) {
  switch (p.dtype) {
    case Dtype::kFloat32:
      return step_on_cpu<float, float, float, float>(p);
    case Dtype::kFloat64:
      return step_on_cpu<double, double, double, double>(p);
    case Dtype::kFloat16:
      return step_half_on_cpu<at::Half>(p);
    case Dtype::kBFloat16:
      return step_half_on_cpu<at::BFloat16>(p);
  }
}

}  // namespace gated_delta
#endif

// What the operator and the way in from Python share.
#if GATED_DELTA_IN_PART(1) || GATED_DELTA_IN_PART(3)
#include <ATen/core/Tensor.h>

// TORCH_EXTENSION_NAME is a macro; these expand it before it is pasted or quoted.
#define GATED_DELTA_STRING_(text) #text
#define GATED_DELTA_STRING(text) GATED_DELTA_STRING_(text)
#define GATED_DELTA_LIBRARY(name, m) TORCH_LIBRARY(name, m)
#define GATED_DELTA_LIBRARY_IMPL(name, key, m) TORCH_LIBRARY_IMPL(name, key, m)
#define GATED_DELTA_INIT_(name) PyInit_##name
#define GATED_DELTA_INIT(name) GATED_DELTA_INIT_(name)

namespace gated_delta {

using at::Tensor;

struct Inputs {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& gate;
  const std::optional<Tensor>& initial_state;
  double scale;
  bool output_final_state;
  bool log_gate;
  const std::optional<Tensor>& cu_seqlens;
};

// May a call on tensors with these keys leave torch's dispatcher out?
bool plain(c10::DispatchKeySet keys);

struct StepInputs {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& gate;
  const Tensor& state;
  const std::optional<Tensor>& state_indices;
  double scale;
  bool log_gate;
};

// Updates the state and returns y; raises where a gradient is asked for.
Tensor call_step(const StepInputs& in);

// Returns y and the final state, which is an undefined tensor when it isn't asked for; on
// autograd's record if `records`.
std::pair<Tensor, Tensor> call_operator(const Inputs& in, bool records);

}  // namespace gated_delta
#endif

#if GATED_DELTA_IN_PART(1)
// ================================= The torch side, in C++ =====================================

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#ifdef GATED_DELTA_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace gated_delta {

#ifdef GATED_DELTA_WITH_CUDA
// In CUDA_SOURCE.
cudaError_t launch_forward(const Params& p, cudaStream_t stream);
int64_t forward_scratch_bytes(const Params& p);
int64_t kept_state_bytes(const Params& p);
bool forward_needs_partial(const Params& p);
cudaError_t launch_backward(const Params& p, const Gradients& grads, void* scratch,
                            cudaStream_t stream);
int64_t backward_scratch_bytes(const Params& p);
Dtype gate_gradient_dtype(const Params& p);
bool backward_wants_copy(const Params& p, const View<int64_t>& dy);
cudaError_t launch_step(const StepParams& p, cudaStream_t stream);
int64_t marks_bytes(const Params& p);
cudaError_t launch_marks(Params& p, const void* offsets, int64_t stride, bool is_long, bool back,
                         bool states, void* memory, cudaStream_t stream);
cudaError_t launch_tails(const Params& p, const Gradients* grads, cudaStream_t stream);
#endif

namespace {

using at::Tensor;

// ======================================== Arguments ===========================================

// Messages are put together from strings: with a compiler that links the C++ library statically, a
// stream would have two copies of it at odds.
std::string text(at::IntArrayRef sizes) {
  std::string result = "[";
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    result += (axis == 0 ? "" : ", ") + std::to_string(sizes[axis]);
  }
  return result + "]";
}

std::string text(at::ScalarType dtype) {
  return c10::toString(dtype);
}

std::string refusal(const char* name, const std::string& expected, const std::string& got) {
  return std::string("gated_delta: `") + name + "` must " + expected + ", got " + got;
}

[[noreturn]] void refuse_type(const char* name, const std::string& expected, at::ScalarType got) {
  C10_THROW_ERROR(TypeError, refusal(name, expected, text(got)));
}

[[noreturn]] void refuse_value(const char* name, const std::string& expected,
                               const std::string& got) {
  C10_THROW_ERROR(ValueError, refusal(name, expected, got));
}

Dtype dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      refuse_type(name, "be float32, float64, float16 or bfloat16", tensor.scalar_type());
  }
}

at::ScalarType state_type(const Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_device(const Tensor& tensor, const char* name, const Tensor& q) {
  if (tensor.device() == q.device()) return;
  refuse_value(name, "be on q's device " + q.device().str(), tensor.device().str());
}

void check_like_q(const Tensor& tensor, const char* name, const Tensor& q) {
  if (tensor.scalar_type() != q.scalar_type()) {
    refuse_type(name, "have q's dtype " + text(q.scalar_type()), tensor.scalar_type());
  }
  check_device(tensor, name, q);
}

bool is_half(Dtype dtype) {
  return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16;
}

// Beside half-precision q also float32 will do.
void check_like_q_or_float(const Tensor& tensor, const char* name, const Tensor& q) {
  const bool half = is_half(dtype_of(q, "q"));
  if (tensor.scalar_type() == q.scalar_type() || (half && tensor.scalar_type() == at::kFloat))
    return;
  refuse_type(name, "have q's dtype " + text(q.scalar_type()) + (half ? " or be Float" : ""),
              tensor.scalar_type());
}

// What whole calls and decode steps check alike: q, k, v and the gate. `axes`: how many come before
// the heads, (B, T) or (B).
template <class Problem>
void describe_operands(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& gate, int64_t axes) {
  const int64_t dims = axes + 2;
  // For messages: a call that is right puts no strings together.
  const auto shape = [&] { return std::string(axes == 2 ? "(B, T, H, " : "(B, H, "); };
  const auto lead = [&] { return std::to_string(dims) + " dimensions " + shape(); };
  p.dtype = dtype_of(q, "q");
  if (q.dim() != dims) refuse_value("q", "have the " + lead() + "K)", text(q.sizes()));
  dtype_of(k, "k");
  dtype_of(v, "v");
  p.gate_dtype = dtype_of(gate, "gate");
  check_like_q(k, "k", q);
  check_like_q(v, "v", q);
  check_like_q_or_float(gate, "gate", q);
  check_device(gate, "gate", q);
  if (k.sizes() != q.sizes()) {
    refuse_value("k", "have q's shape " + shape() + "K) = " + text(q.sizes()), text(k.sizes()));
  }
  const int64_t row_heads = q.size(axes);
  if (v.dim() != dims || v.sizes().slice(0, axes) != q.sizes().slice(0, axes) ||
      (v.size(axes) != row_heads &&
       (row_heads == 0 || v.size(axes) == 0 || v.size(axes) % row_heads != 0))) {
    refuse_value("v",
                 "have " + lead() + "V), the first " + (axes == 2 ? "three" : "two") + " q's " +
                     text(q.sizes().slice(0, axes + 1)) + " or H a multiple of q's",
                 text(v.sizes()));
  }
  p.B = q.size(0);
  p.H = v.size(axes);
  p.K = q.size(axes + 1);
  p.V = v.size(axes + 1);
  if (p.H != row_heads) p.group = p.H / row_heads;
  bool broadcasts = gate.dim() == dims;
  for (int64_t axis = 0; broadcasts && axis < dims; ++axis) {
    broadcasts = gate.size(axis) == 1 || gate.size(axis) == v.size(axis);
  }
  if (!broadcasts) {
    refuse_value("gate",
                 "have " + std::to_string(dims) + " dimensions that broadcast to " + shape() +
                     "V) = " + text(v.sizes()),
                 text(gate.sizes()));
  }
}

// Checks everything; describes the problem but for the outputs.
Params describe(const Inputs& in) {
  const Tensor& q = in.q;
  Params p;
  describe_operands(p, q, in.k, in.v, in.gate, 2);
  p.T = q.size(1);
  if (in.cu_seqlens) {
    const Tensor& offsets = *in.cu_seqlens;
    if (offsets.scalar_type() != at::kInt && offsets.scalar_type() != at::kLong)
      refuse_type("cu_seqlens", "be int32 or int64", offsets.scalar_type());
    check_device(offsets, "cu_seqlens", q);
    if (offsets.dim() != 1 || offsets.size(0) < 2)
      refuse_value("cu_seqlens", "have shape (N + 1,), N at least 1", text(offsets.sizes()));
    if (p.B != 1) refuse_value("q", "have B = 1 beside cu_seqlens, (1, T, H, K)", text(q.sizes()));
    p.sequences = offsets.size(0) - 1;
  }
  const bool packed = in.cu_seqlens.has_value();
  if (in.initial_state) {
    const Tensor& state = *in.initial_state;
    dtype_of(state, "initial_state");
    if (state.scalar_type() != state_type(q)) {
      refuse_type("initial_state",
                  "be " + text(state_type(q)) + " beside " + text(q.scalar_type()) + " inputs",
                  state.scalar_type());
    }
    check_device(state, "initial_state", q);
    const int64_t shape[4] = {packed ? p.sequences : p.B, p.H, p.K, p.V};
    if (state.sizes() != at::IntArrayRef(shape)) {
      const std::string axes = packed ? "(N, H, K, V) = " : "(B, H, K, V) = ";
      refuse_value("initial_state", "have shape " + axes + text(shape), text(state.sizes()));
    }
  }

  const auto view = [](const Tensor& tensor) {
    View<int64_t> result;
    result.data = const_cast<void*>(tensor.const_data_ptr());
    for (int64_t axis = 0; axis < 4; ++axis) result.stride[axis] = tensor.stride(axis);
    return result;
  };
  p.q = view(q);
  p.k = view(in.k);
  p.v = view(in.v);
  if (q.size(2) == 1) p.q.stride[2] = p.k.stride[2] = 0;
  p.gate = view(in.gate);
  for (int64_t axis = 0; axis < 4; ++axis) {
    if (in.gate.size(axis) == 1) p.gate.stride[axis] = 0;
  }
  if (in.initial_state) p.initial_state = view(*in.initial_state);
  p.scale = in.scale;
  p.log_gate = in.log_gate;
  return p;
}

// Checks everything about a decode step; describes it but for y.
StepParams describe_step(const StepInputs& in) {
  const Tensor& q = in.q;
  const Tensor& state = in.state;
  StepParams p;
  describe_operands(p, q, in.k, in.v, in.gate, 1);
  p.state_dtype = dtype_of(state, "state");
  check_like_q_or_float(state, "state", q);
  check_device(state, "state", q);
  const bool pooled = in.state_indices.has_value();
  p.pool = state.dim() == 4 ? state.size(0) : 0;
  const int64_t shape[4] = {pooled ? p.pool : p.B, p.H, p.K, p.V};
  if (state.sizes() != at::IntArrayRef(shape)) {
    const std::string axes = pooled ? "(pool, H, K, V), the last three " : "(B, H, K, V) = ";
    const at::IntArrayRef wanted(shape);
    refuse_value("state", "have shape " + axes + text(pooled ? wanted.slice(1) : wanted),
                 text(state.sizes()));
  }
  for (int64_t axis = 0; axis < 4; ++axis) {
    if (state.size(axis) > 1 && state.stride(axis) == 0) {
      refuse_value("state", "have its own memory for every element, as it is written to",
                   "strides " + text(state.strides()));
    }
  }

  const auto view = [](const Tensor& tensor) {
    View<int64_t> result;
    result.data = const_cast<void*>(tensor.const_data_ptr());
    result.stride[0] = tensor.size(0) == 1 ? 0 : tensor.stride(0);
    result.stride[2] = tensor.size(1) == 1 ? 0 : tensor.stride(1);
    result.stride[3] = tensor.size(2) == 1 ? 0 : tensor.stride(2);
    return result;
  };
  p.q = view(q);
  p.k = view(in.k);
  p.v = view(in.v);
  p.gate = view(in.gate);
  p.state.data = state.mutable_data_ptr();
  for (int64_t axis = 0; axis < 4; ++axis) p.state.stride[axis] = state.stride(axis);
  if (p.V == 1) p.state.stride[3] = 1;
  p.scale = in.scale;
  p.log_gate = in.log_gate;
  if (!pooled) return p;
  const Tensor& indices = *in.state_indices;
  if (indices.scalar_type() != at::kInt && indices.scalar_type() != at::kLong)
    refuse_type("state_indices", "be int32 or int64", indices.scalar_type());
  check_device(indices, "state_indices", q);
  if (indices.dim() != 1 || indices.size(0) != p.B) {
    const int64_t batches[1] = {p.B};
    refuse_value("state_indices", "have shape (B,) = " + text(batches), text(indices.sizes()));
  }
  p.long_indices = indices.scalar_type() == at::kLong;
  p.indices = indices.const_data_ptr();
  p.index_stride = indices.stride(0);
  for (int64_t b = 0; q.device().is_cpu() && b < p.B; ++b) {
    const int64_t row = p.long_indices ? static_cast<const int64_t*>(p.indices)[b * p.index_stride]
                                       : static_cast<const int32_t*>(p.indices)[b * p.index_stride];
    if (row >= p.pool) {
      refuse_value("state_indices", "hold numbers below the pool's " + std::to_string(p.pool),
                   std::to_string(row));
    }
  }
  return p;
}

View<int64_t> contiguous_view(void* data, int64_t b, int64_t c, int64_t d) {
  View<int64_t> result;
  result.data = data;
  result.stride[0] = b * c * d;
  result.stride[1] = c * d;
  result.stride[2] = d;
  result.stride[3] = 1;
  return result;
}

// ======================================== The operator ========================================

// A new tensor; on a GPU the device must be the current one.
Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
#ifdef GATED_DELTA_WITH_CUDA
  // Without empty_cuda's own look at the device, which OnDevice had.
  if (device.is_cuda()) {
    return at::detail::empty_generic(sizes, c10::cuda::CUDACachingAllocator::get(),
                                     c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype,
                                     std::nullopt);
  }
#endif
  return at::detail::empty_cpu(sizes, dtype);
}

class OnDevice {
 public:
  explicit OnDevice(at::Device device) {
#ifdef GATED_DELTA_WITH_CUDA
    if (device.is_cuda()) guard_.set_device(device);
#else
    if (device.is_cpu()) return;
    refuse_value("q", "be on the CPU: this build has no CUDA kernels", device.str());
#endif
  }

#ifdef GATED_DELTA_WITH_CUDA
 private:
  c10::cuda::OptionalCUDAGuard guard_;
#endif
};

// What stands for a result that isn't there.
Tensor nothing(at::ScalarType dtype, at::Device device) {
  const OnDevice on_device(device);
  return allocate({0}, dtype, device);
}

// Where packed sequences lie; nothing where there are none.
class Packing {
 public:
  // Checks offsets that lie in the CPU's memory.
  Packing(const Params& p, const Inputs& in) : in_(in) {
    if (!in.cu_seqlens || !in.q.device().is_cpu()) return;
    borders_.resize(p.sequences + 1);
    const void* data = in.cu_seqlens->const_data_ptr();
    for (int64_t n = 0; n <= p.sequences; ++n) {
      const int64_t at = n * in.cu_seqlens->stride(0);
      borders_[n] =
          is_long() ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
      if (n > 0 && borders_[n] < borders_[n - 1]) {
        refuse_value("cu_seqlens", "never decrease",
                     std::to_string(borders_[n]) + " after " + std::to_string(borders_[n - 1]));
      }
    }
    if (borders_.front() != 0)
      refuse_value("cu_seqlens", "start at 0", std::to_string(borders_.front()));
    if (borders_.back() != p.T) {
      refuse_value("cu_seqlens", "end at T = " + std::to_string(p.T),
                   std::to_string(borders_.back()));
    }
  }

  // Before all launches. `states`: somebody has or wants them, or their gradients.
  void begin(Params& p, Gradients* grads, bool states) {
    if (!in_.cu_seqlens) return;
    const at::Device device = in_.q.device();
    if (device.is_cpu()) {
      // There each is a batch of its own, whose steps lie in the one row.
      p.borders = borders_.data();
      p.B = p.sequences;
      for (View<int64_t>* view : {&p.q, &p.k, &p.v, &p.gate, &p.y}) view->stride[0] = 0;
      if (grads == nullptr) return;
      for (View<int64_t>* view : {&grads->dy, &grads->dq, &grads->dk, &grads->dv, &grads->dgate})
        view->stride[0] = 0;
      return;
    }
#ifdef GATED_DELTA_WITH_CUDA
    memory_ = allocate({marks_bytes(p)}, at::kByte, device);
    const Tensor& offsets = *in_.cu_seqlens;
    C10_CUDA_CHECK(launch_marks(p, offsets.const_data_ptr(), offsets.stride(0), is_long(),
                                grads != nullptr, states, memory_.mutable_data_ptr(),
                                c10::cuda::getCurrentCUDAStream(device.index())));
#endif
  }

  // After all launches.
  void finish(const Params& p, const Gradients* grads) {
#ifdef GATED_DELTA_WITH_CUDA
    if (!memory_.defined()) return;
    C10_CUDA_CHECK(launch_tails(p, grads, c10::cuda::getCurrentCUDAStream(in_.q.device().index())));
#endif
  }

 private:
  bool is_long() const { return in_.cu_seqlens->scalar_type() == at::kLong; }

  const Inputs& in_;
  std::vector<int64_t> borders_;
  Tensor memory_;
};

// Returns y and the final state, which is an undefined tensor when it isn't asked for. `states`, if
// there will be a backward: becomes what it should find, or stays undefined.
std::pair<Tensor, Tensor> forward(const Inputs& in, Tensor* states = nullptr) {
  Params p = describe(in);
  const at::Device device = in.q.device();
  const OnDevice on_device(device);
  Packing packing(p, in);
  const int64_t sequences = in.cu_seqlens ? p.sequences : p.B;
  const Tensor y = allocate({p.B, p.T, p.H, p.V}, in.q.scalar_type(), device);
  p.y = contiguous_view(y.mutable_data_ptr(), p.T, p.H, p.V);
  Tensor final_state;
  if (in.output_final_state) {
    final_state = allocate({sequences, p.H, p.K, p.V}, state_type(in.q), device);
    p.final_state = contiguous_view(final_state.mutable_data_ptr(), p.H, p.K, p.V);
  }
  if (p.T == 0 && final_state.defined()) {
    if (in.initial_state) {
      final_state.copy_(*in.initial_state);
    } else {
      final_state.zero_();
    }
  }
  if (y.numel() == 0) return {y, final_state};
  packing.begin(p, nullptr, in.initial_state.has_value() || in.output_final_state);
  if (device.is_cpu()) {
    run_on_cpu(p, nullptr);
  }
#ifdef GATED_DELTA_WITH_CUDA
  else {
    Tensor partial;
    if (forward_needs_partial(p)) {
      partial = allocate({p.B, p.T, p.H, p.V}, state_type(in.q), device);
      p.partial = contiguous_view(partial.mutable_data_ptr(), p.T, p.H, p.V);
    }
    const int64_t kept_bytes = states == nullptr ? 0 : kept_state_bytes(p);
    if (kept_bytes > 0) {
      *states = allocate({kept_bytes / static_cast<int64_t>(in.q.element_size())},
                         in.q.scalar_type(), device);
      p.states = states->mutable_data_ptr();
    }
    Tensor scratch;
    const int64_t scratch_bytes = forward_scratch_bytes(p);
    if (scratch_bytes > 0) {
      scratch = allocate({scratch_bytes}, at::kByte, device);
      p.scratch = scratch.mutable_data_ptr();
    }
    C10_CUDA_CHECK(launch_forward(p, c10::cuda::getCurrentCUDAStream(device.index())));
    packing.finish(p, nullptr);
  }
#endif
  return {y, final_state};
}

Tensor step(const StepInputs& in) {
  StepParams p = describe_step(in);
  const at::Device device = in.q.device();
  const OnDevice on_device(device);
  const Tensor y = allocate({p.B, p.H, p.V}, in.q.scalar_type(), device);
  if (y.numel() == 0) return y;
  p.y = contiguous_view(y.mutable_data_ptr(), 1, p.H, p.V);
  if (device.is_cpu()) {
    step_on_cpu(p);
  }
#ifdef GATED_DELTA_WITH_CUDA
  else {
    C10_CUDA_CHECK(launch_step(p, c10::cuda::getCurrentCUDAStream(device.index())));
  }
#endif
  return y;
}

Tensor step_operator(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate,
                     const Tensor& state, const std::optional<Tensor>& state_indices, double scale,
                     bool log_gate) {
  return step({q, k, v, gate, state, state_indices, scale, log_gate});
}

using Needed = std::array<bool, 5>;  // the gradients of q, k, v, gate and initial_state

View<int64_t> describe_gradient(const std::optional<Tensor>& tensor, const char* name,
                                at::IntArrayRef shape, at::ScalarType dtype, const Tensor& q) {
  View<int64_t> view;
  if (!tensor) return view;
  if (tensor->scalar_type() != dtype) refuse_type(name, "be " + text(dtype), tensor->scalar_type());
  check_device(*tensor, name, q);
  if (tensor->sizes() != shape)
    refuse_value(name, "have shape " + text(shape), text(tensor->sizes()));
  view.data = const_cast<void*>(tensor->const_data_ptr());
  for (int64_t axis = 0; axis < 4; ++axis) view.stride[axis] = tensor->stride(axis);
  return view;
}

// Returns the needed gradients; the others are undefined tensors. `states`: what the forward left,
// or undefined.
std::array<Tensor, 5> backward(const Inputs& in, const std::optional<Tensor>& dy,
                               const std::optional<Tensor>& dfinal_state, const Needed& needed,
                               const Tensor& states = {}) {
  Params p = describe(in);
  const at::Device device = in.q.device();
  const OnDevice on_device(device);
  Packing packing(p, in);
  const at::ScalarType dtype = in.q.scalar_type();
  const int64_t values[4] = {p.B, p.T, p.H, p.V};
  const int64_t state[4] = {in.cu_seqlens ? p.sequences : p.B, p.H, p.K, p.V};
  Gradients grads;
  grads.dy = describe_gradient(dy, "dy", values, dtype, in.q);
  grads.dfinal_state =
      describe_gradient(dfinal_state, "dfinal_state", state, state_type(in.q), in.q);
  at::ScalarType gate_type = state_type(in.q);
  Tensor dy_copy;
#ifdef GATED_DELTA_WITH_CUDA
  if (device.is_cuda() && p.B * p.T * p.H * p.K * p.V > 0) {
    packing.begin(p, &grads, in.initial_state.has_value() || dfinal_state.has_value());
    if (gate_gradient_dtype(p) == p.gate_dtype) gate_type = in.gate.scalar_type();
    if (backward_wants_copy(p, grads.dy)) {
      dy_copy = allocate(values, dtype, device);
      if (dy) {
        dy_copy.copy_(*dy);
      } else {
        dy_copy.zero_();
      }
      grads.dy = contiguous_view(dy_copy.mutable_data_ptr(), p.T, p.H, p.V);
    }
  }
#endif
  std::array<Tensor, 5> result;
  const auto place = [&](int which, at::IntArrayRef shape, at::ScalarType type) {
    View<int64_t> view;
    if (!needed[which]) return view;
    result[which] = allocate(shape, type, device);
    return contiguous_view(result[which].mutable_data_ptr(), shape[1], shape[2], shape[3]);
  };
  const int64_t rows[4] = {p.B, p.T, p.H, p.K};
  grads.dq = place(0, rows, dtype);
  grads.dk = place(1, rows, dtype);
  grads.dv = place(2, values, dtype);
  grads.dgate = place(3, values, gate_type);
  grads.dinitial_state = place(4, state, state_type(in.q));
  if (p.B * p.T * p.H * p.K * p.V == 0) {
    for (Tensor& each : result) {
      if (each.defined()) each.zero_();
    }
    if (p.T == 0 && result[4].defined() && dfinal_state) result[4].copy_(*dfinal_state);
  } else if (device.is_cpu()) {
    packing.begin(p, &grads, true);
    run_on_cpu(p, &grads);
  }
#ifdef GATED_DELTA_WITH_CUDA
  else {
    // Hooks on what autograd keeps may have changed them; then they are made again.
    if (states.defined() && states.device() == device && states.scalar_type() == dtype &&
        states.is_contiguous() && static_cast<int64_t>(states.nbytes()) == kept_state_bytes(p) &&
        reinterpret_cast<uintptr_t>(states.const_data_ptr()) % 16 == 0) {
      p.states = const_cast<void*>(states.const_data_ptr());
    }
    const int64_t bytes = backward_scratch_bytes(p);
    Tensor scratch;
    if (bytes > 0) scratch = allocate({bytes}, at::kByte, device);
    C10_CUDA_CHECK(launch_backward(p, grads, bytes > 0 ? scratch.mutable_data_ptr() : nullptr,
                                   c10::cuda::getCurrentCUDAStream(device.index())));
    packing.finish(p, &grads);
  }
#endif
  for (int which = 0; p.group > 1 && which < 2; ++which) {
    // Sums of half-precision numbers are float32.
    if (result[which].defined())
      result[which] = result[which].view({in.q.size(0), p.T, p.H / p.group, p.group, p.K}).sum(3);
  }
  if (result[3].defined() && in.gate.sizes() != result[3].sizes()) {
    std::vector<int64_t> axes;
    for (int64_t axis = 0; axis < 4; ++axis) {
      if (in.gate.size(axis) == 1) axes.push_back(axis);
    }
    result[3] = result[3].sum(axes, /*keepdim=*/true);
  }
  if (result[3].defined() && result[3].scalar_type() != in.gate.scalar_type())
    result[3] = result[3].to(in.gate.scalar_type());
  return result;
}

std::tuple<Tensor, Tensor> forward_operator(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& gate,
                                            const std::optional<Tensor>& initial_state,
                                            double scale, bool output_final_state, bool log_gate,
                                            const std::optional<Tensor>& cu_seqlens) {
  auto [y, final_state] =
      forward({q, k, v, gate, initial_state, scale, output_final_state, log_gate, cu_seqlens});
  if (!final_state.defined()) final_state = nothing(state_type(q), q.device());
  return {y, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_operator(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate,
    const std::optional<Tensor>& initial_state, const std::optional<Tensor>& dy,
    const std::optional<Tensor>& dfinal_state, double scale, bool log_gate, Needed needed,
    const std::optional<Tensor>& cu_seqlens) {
  auto result = backward({q, k, v, gate, initial_state, scale, false, log_gate, cu_seqlens}, dy,
                         dfinal_state, needed);
  for (Tensor& each : result) {
    if (!each.defined()) each = nothing(q.scalar_type(), q.device());
  }
  return {result[0], result[1], result[2], result[3], result[4]};
}

// The operators as torch's dispatcher knows them.
template <typename Signature>
auto registered(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

const auto& registered_forward() {
  static const auto handle =
      registered<decltype(forward_operator)>(GATED_DELTA_STRING(TORCH_EXTENSION_NAME) "::forward");
  return handle;
}

const auto& registered_backward() {
  static const auto handle = registered<decltype(backward_operator)>(
      GATED_DELTA_STRING(TORCH_EXTENSION_NAME) "::backward");
  return handle;
}

const auto& registered_step() {
  static const auto handle =
      registered<decltype(step_operator)>(GATED_DELTA_STRING(TORCH_EXTENSION_NAME) "::step");
  return handle;
}

// ========================================= Autograd ===========================================
//
// ForwardFunction records a call that came through the dispatcher, StraightNode one that did not.
// Forward-mode tangents and gradients of gradients are refused.

// May a backward on these tensors leave dispatcher and profilers out? Undefined ones don't count.
bool goes_straight(std::initializer_list<const Tensor*> tensors) {
  c10::DispatchKeySet keys;
  for (const Tensor* each : tensors) {
    if (each->defined()) keys = keys | each->key_set();
  }
  return plain(keys) && !at::hasCallbacks();
}

void refuse_tangent(const Tensor& tensor, const char* name) {
  if (!tensor.defined() || !tensor._fw_grad(0).defined()) return;
  C10_THROW_ERROR(NotImplementedError, std::string("gated_delta: `") + name +
                                           "` carries a tangent, but forward-mode differentiation "
                                           "is not supported; use reverse mode");
}

// Its forward keeps the inputs and nothing else; the backward computes the states again.
// StraightNode below keeps states as well.
class ForwardFunction : public torch::autograd::Function<ForwardFunction> {
 public:
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
      const Tensor& gate, const std::optional<Tensor>& initial_state, double scale,
      bool output_final_state, bool log_gate, const std::optional<Tensor>& cu_seqlens) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    keep(ctx, {q, k, v, gate, initial_state, scale, output_final_state, log_gate, cu_seqlens}, {});
    auto [y, final_state] = registered_forward().call(q, k, v, gate, initial_state, scale,
                                                      output_final_state, log_gate, cu_seqlens);
    if (!output_final_state) ctx->mark_non_differentiable({final_state});
    return {y, final_state};
  }

  // `states`: what the forward left for the backward, if anything.
  static void keep(torch::autograd::AutogradContext* ctx, const Inputs& in, const Tensor& states) {
    torch::autograd::variable_list kept;
    kept.reserve(7);
    kept.insert(kept.end(), {in.q, in.k, in.v, in.gate});
    kept.push_back(in.initial_state ? *in.initial_state : Tensor());
    if (in.cu_seqlens || states.defined())
      kept.push_back(in.cu_seqlens ? *in.cu_seqlens : Tensor());
    if (states.defined()) kept.push_back(states);
    ctx->save_for_backward(std::move(kept));
    if (in.scale != 1) ctx->saved_data["scale"] = in.scale;
    if (in.log_gate) ctx->saved_data["log_gate"] = true;
    ctx->set_materialize_grads(false);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    std::array<Tensor, 5> computed = compute(*ctx, gradients);
    torch::autograd::variable_list result(9);
    std::move(computed.begin(), computed.end(), result.begin());
    return result;
  }

  // The gradients that are needed; the others are undefined tensors.
  static std::array<Tensor, 5> compute(const torch::autograd::AutogradContext& ctx,
                                       const torch::autograd::variable_list& gradients) {
    const auto saved = ctx.get_saved_variables();
    const auto optional = [](const torch::autograd::variable_list& list, size_t n) {
      return n < list.size() && list[n].defined() ? std::optional<Tensor>(list[n]) : std::nullopt;
    };
    const std::optional<Tensor> initial_state = optional(saved, 4);
    const std::optional<Tensor> cu_seqlens = optional(saved, 5);
    const std::optional<Tensor> dy = optional(gradients, 0);
    const std::optional<Tensor> dfinal_state = optional(gradients, 1);
    double scale = 1;
    bool log_gate = false;
    if (!ctx.saved_data.empty()) {
      const auto scale_at = ctx.saved_data.find("scale");
      if (scale_at != ctx.saved_data.end()) scale = scale_at->second.toDouble();
      log_gate = ctx.saved_data.find("log_gate") != ctx.saved_data.end();
    }
    Needed needed;
    for (size_t n = 0; n < 5; ++n) needed[n] = saved[n].defined() && ctx.needs_input_grad(n);
    const Tensor none;
    if (!at::GradMode::is_enabled() &&
        goes_straight({&saved[0], &saved[1], &saved[2], &saved[3], &saved[4], dy ? &*dy : &none,
                       dfinal_state ? &*dfinal_state : &none, cu_seqlens ? &*cu_seqlens : &none})) {
      return gated_delta::backward({saved[0], saved[1], saved[2], saved[3], initial_state, scale,
                                    false, log_gate, cu_seqlens},
                                   dy, dfinal_state, needed, saved.size() > 6 ? saved[6] : none);
    }
    auto [dq, dk, dv, dgate, dinitial_state] =
        registered_backward().call(saved[0], saved[1], saved[2], saved[3], initial_state, dy,
                                   dfinal_state, scale, log_gate, needed, cu_seqlens);
    std::array<Tensor, 5> result = {dq, dk, dv, dgate, dinitial_state};
    for (size_t n = 0; n < 5; ++n) {
      if (!needed[n]) result[n].reset();
    }
    return result;
  }
};

// The entry that ForwardFunction::apply makes in autograd's record, in less time: torch's way there
// describes every operand, searches sets for outputs that are inputs, and makes its own name anew.
class StraightNode : public torch::autograd::CppNode<ForwardFunction> {
 public:
  // Older torch counts a node's owners in a std::shared_ptr, newer in the node.
  template <class Self>
  static auto make() {
    if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function),
                                 std::shared_ptr<torch::autograd::Node>>) {
      return std::shared_ptr<Self>(new Self, [](Self* node) { deleteNode(node); });
    } else {
      return c10::make_intrusive<Self>();
    }
  }

  // Newer torch tells hooks of every new node.
  template <class Owner>
  static auto announce(const Owner& node, int) -> decltype(fire_node_creation_hooks(node), void()) {
    fire_node_creation_hooks(node);
  }
  template <class Owner>
  static void announce(const Owner&, int64_t) {}

  // The forward, on autograd's record.
  static std::pair<Tensor, Tensor> record(const Inputs& in) {
    std::pair<Tensor, Tensor> outputs;
    Tensor states;
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      at::AutoGradMode no_grad(false);
      // Hooks on what is kept, such as checkpointing's, want the same kept on every way here, and
      // not more than needed.
      const bool hooked = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
      outputs = gated_delta::forward(in, hooked ? nullptr : &states);
    }
    const auto node = make<StraightNode>();
    node->set_ctx_grad_fn(node);
    if (in.initial_state && in.cu_seqlens) {
      node->set_next_edges(torch::autograd::collect_next_edges(in.q, in.k, in.v, in.gate,
                                                               *in.initial_state, *in.cu_seqlens));
    } else if (in.initial_state || in.cu_seqlens) {
      node->set_next_edges(torch::autograd::collect_next_edges(
          in.q, in.k, in.v, in.gate, in.initial_state ? *in.initial_state : *in.cu_seqlens));
    } else {
      node->set_next_edges(torch::autograd::collect_next_edges(in.q, in.k, in.v, in.gate));
    }
    // As ForwardFunction::forward has them: four operands, the state, three numbers, the offsets.
    node->is_variable_input_.resize(9);
    for (int n = 0; n < 4; ++n) node->is_variable_input_[n] = true;
    node->is_variable_input_[4] = in.initial_state.has_value();
    node->is_variable_input_[8] = in.cu_seqlens.has_value();
    ForwardFunction::keep(&node->ctx_, in, states);
    torch::autograd::set_history(outputs.first, node);
    if (in.output_final_state) torch::autograd::set_history(outputs.second, node);
    node->save_variables_to_ctx();
    announce(decltype(torch::autograd::Edge::function)(node), 0);
    return outputs;
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::array<Tensor, 5> computed = ForwardFunction::compute(ctx_, gradients);
    torch::autograd::variable_list result(num_outputs());
    const size_t count = is_variable_input_[4] ? 5 : 4;
    std::move(computed.begin(), computed.begin() + count, result.begin());
    return result;
  }

  std::string name() const override {
    static const std::string theirs =
        c10::demangle(typeid(torch::autograd::CppNode<ForwardFunction>).name());
    return theirs;
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& gate,
                                            const std::optional<Tensor>& initial_state,
                                            double scale, bool output_final_state, bool log_gate,
                                            const std::optional<Tensor>& cu_seqlens) {
  refuse_tangent(q, "q");
  refuse_tangent(k, "k");
  refuse_tangent(v, "v");
  refuse_tangent(gate, "gate");
  refuse_tangent(initial_state.value_or(Tensor()), "initial_state");
  const auto result = ForwardFunction::apply(q, k, v, gate, initial_state, scale,
                                             output_final_state, log_gate, cu_seqlens);
  return {result[0], result[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_autograd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate,
    const std::optional<Tensor>& initial_state, const std::optional<Tensor>& dy,
    const std::optional<Tensor>& dfinal_state, double scale, bool log_gate, Needed needed,
    const std::optional<Tensor>& cu_seqlens) {
  for (const Tensor& each : {q, k, v, gate, initial_state.value_or(Tensor()), dy.value_or(Tensor()),
                             dfinal_state.value_or(Tensor())}) {
    if (!each.defined() || !at::GradMode::is_enabled() || !each.requires_grad()) continue;
    C10_THROW_ERROR(NotImplementedError,
                    "gated_delta: gradients of gradients are not supported; call backward without "
                    "create_graph=True");
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return registered_backward().call(q, k, v, gate, initial_state, dy, dfinal_state, scale, log_gate,
                                    needed, cu_seqlens);
}

void refuse_gradient(const Tensor& tensor, const char* name) {
  refuse_tangent(tensor, name);
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return;
  C10_THROW_ERROR(NotImplementedError, std::string("gated_delta: `") + name +
                                           "` must not require grad for gated_delta_step, which "
                                           "is for inference, got requires_grad=True; call it "
                                           "under torch.no_grad() or take gated_delta");
}

// What autograd has to do with a step: nothing, but for the count of the state's changes.
void watch_step(const StepInputs& in) {
  refuse_gradient(in.q, "q");
  refuse_gradient(in.k, "k");
  refuse_gradient(in.v, "v");
  refuse_gradient(in.gate, "gate");
  refuse_gradient(in.state, "state");
  in.state.unsafeGetTensorImpl()->bump_version();
}

Tensor step_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate,
                     const Tensor& state, const std::optional<Tensor>& state_indices, double scale,
                     bool log_gate) {
  watch_step({q, k, v, gate, state, state_indices, scale, log_gate});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return registered_step().call(q, k, v, gate, state, state_indices, scale, log_gate);
}

// Under autocast float32 q, k and v take the cheap type; gate and states stay as they are.
Tensor step_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate,
                     const Tensor& state, const std::optional<Tensor>& state_indices, double scale,
                     bool log_gate) {
  const at::DeviceType device = q.device().type();
  c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}));
  const auto cast = [&](const Tensor& tensor) {
    if (tensor.scalar_type() != at::kFloat) return tensor;
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  };
  return registered_step().call(cast(q), cast(k), cast(v), gate, state, state_indices, scale,
                                log_gate);
}

std::tuple<Tensor, Tensor> forward_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& gate,
                                            const std::optional<Tensor>& initial_state,
                                            double scale, bool output_final_state, bool log_gate,
                                            const std::optional<Tensor>& cu_seqlens) {
  const at::DeviceType device = q.device().type();
  c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}));
  const auto cast = [&](const Tensor& tensor) {
    if (tensor.scalar_type() != at::kFloat) return tensor;
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  };
  return registered_forward().call(cast(q), cast(k), cast(v), gate, initial_state, scale,
                                   output_final_state, log_gate, cu_seqlens);
}

// ---- Registration.

GATED_DELTA_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? initial_state, float scale, "
      "bool output_final_state, bool log_gate, Tensor? cu_seqlens=None) -> "
      "(Tensor y, Tensor final_state)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "backward(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? initial_state, Tensor? dy, "
      "Tensor? dfinal_state, float scale, bool log_gate, bool[5] needed, "
      "Tensor? cu_seqlens=None) -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dgate, Tensor dinitial_state)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "step(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor(a!) state, Tensor? state_indices, "
      "float scale, bool log_gate) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

GATED_DELTA_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) {
  m.impl("forward", forward_operator);
  m.impl("backward", backward_operator);
  m.impl("step", step_operator);
}
GATED_DELTA_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("forward", forward_operator);
  m.impl("backward", backward_operator);
  m.impl("step", step_operator);
}
GATED_DELTA_LIBRARY_IMPL(TORCH_EXTENSION_NAME, Autograd, m) {
  m.impl("forward", forward_autograd);
  m.impl("backward", backward_autograd);
  m.impl("step", step_autograd);
}
GATED_DELTA_LIBRARY_IMPL(TORCH_EXTENSION_NAME, AutocastCPU, m) {
  m.impl("forward", forward_autocast);
  m.impl("step", step_autocast);
}
GATED_DELTA_LIBRARY_IMPL(TORCH_EXTENSION_NAME, AutocastCUDA, m) {
  m.impl("forward", forward_autocast);
  m.impl("step", step_autocast);
}

}  // namespace

// Where the dispatcher would lead straight to a kernel of ours, past at most autograd: no tracing,
// autocast, functorch transform, dispatch mode or subclass has a stake in the call.
bool plain(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  keys = (keys | local.included_) - local.excluded_;
  constexpr c10::DispatchKeySet ordinary(
      {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
       DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect});
  return (keys.raw_repr() & ~ordinary.raw_repr()) == 0;
}

Tensor call_step(const StepInputs& in) {
  watch_step(in);
  return step(in);
}

std::pair<Tensor, Tensor> call_operator(const Inputs& in, bool records) {
  return records ? StraightNode::record(in) : forward(in);
}

}  // namespace gated_delta
#endif

#if GATED_DELTA_IN_PART(3)
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace gated_delta {
namespace {

// =================================== The short way from Python ================================
//
// A small problem takes the GPU 3 us, the way through torch.ops and the dispatcher twice that.
// `call` goes straight to `forward`, or to StraightNode, which records it, when nothing between has
// a stake in the call: plain tensors, no torch function mode, tangent or profiler, and `plain`
// keys. Otherwise it returns NotImplemented, and Python takes the long way.

// Releases the interpreter for a scope; pybind11's own looks up its internals each time.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 9, "call takes 9 arguments");
  PyObject* const initial_state_object = arguments[5];
  const bool has_state = initial_state_object != Py_None;
  const bool has_sequences = arguments[8] != Py_None;
  bool straight = !at::impl::torch_function_mode_enabled() && !at::hasCallbacks() &&
                  (PyFloat_Check(arguments[4]) || PyLong_CheckExact(arguments[4])) &&
                  PyBool_Check(arguments[6]) && PyBool_Check(arguments[7]);
  bool records = false;
  c10::DispatchKeySet keys;
  for (int n = 0; n < (has_sequences ? 9 : 6); ++n) {
    if (n == 4 || (n == 5 && !has_state) || n == 6 || n == 7) continue;
    straight = straight && THPVariable_CheckExact(arguments[n]);
    if (!straight) break;
    const Tensor& tensor = THPVariable_Unpack(arguments[n]);
    keys = keys | tensor.key_set();
    straight = !tensor._fw_grad(0).defined();
    records = records || (at::GradMode::is_enabled() && tensor.requires_grad());
#ifndef GATED_DELTA_WITH_CUDA
    straight = straight && tensor.device().is_cpu();
#endif
  }
  if (!straight || !plain(keys)) Py_RETURN_NOTIMPLEMENTED;
  const double scale = PyFloat_AsDouble(arguments[4]);
  if (scale == -1 && PyErr_Occurred()) return nullptr;  // an int beyond every float
  std::optional<Tensor> initial_state;
  if (has_state) initial_state = THPVariable_Unpack(initial_state_object);
  std::optional<Tensor> cu_seqlens;
  if (has_sequences) cu_seqlens = THPVariable_Unpack(arguments[8]);
  const Inputs in{THPVariable_Unpack(arguments[0]),
                  THPVariable_Unpack(arguments[1]),
                  THPVariable_Unpack(arguments[2]),
                  THPVariable_Unpack(arguments[3]),
                  initial_state,
                  scale,
                  arguments[6] == Py_True,
                  arguments[7] == Py_True,
                  cu_seqlens};
  std::pair<Tensor, Tensor> result;
  {
    const WithoutGil without_gil;
    result = call_operator(in, records);
  }
  PyObject* y = THPVariable_Wrap(result.first);
  PyObject* final_state =
      result.second.defined() ? THPVariable_Wrap(result.second) : Py_NewRef(Py_None);
  PyObject* pair = PyTuple_Pack(2, y, final_state);
  Py_DECREF(y);
  Py_DECREF(final_state);
  return pair;
  END_HANDLE_TH_ERRORS
}

// Likewise for gated_delta_step.
PyObject* call_step(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 8, "call_step takes 8 arguments");
  const bool has_indices = arguments[7] != Py_None;
  bool straight = !at::impl::torch_function_mode_enabled() && !at::hasCallbacks() &&
                  (PyFloat_Check(arguments[5]) || PyLong_CheckExact(arguments[5])) &&
                  PyBool_Check(arguments[6]);
  c10::DispatchKeySet keys;
  for (int n = 0; n < 8; ++n) {
    if (n == 5 || n == 6 || (n == 7 && !has_indices)) continue;
    straight = straight && THPVariable_CheckExact(arguments[n]);
    if (!straight) break;
    const Tensor& tensor = THPVariable_Unpack(arguments[n]);
    keys = keys | tensor.key_set();
#ifndef GATED_DELTA_WITH_CUDA
    straight = straight && tensor.device().is_cpu();
#endif
  }
  if (!straight || !plain(keys)) Py_RETURN_NOTIMPLEMENTED;
  const double scale = PyFloat_AsDouble(arguments[5]);
  if (scale == -1 && PyErr_Occurred()) return nullptr;  // an int beyond every float
  std::optional<Tensor> state_indices;
  if (has_indices) state_indices = THPVariable_Unpack(arguments[7]);
  const StepInputs in{THPVariable_Unpack(arguments[0]),
                      THPVariable_Unpack(arguments[1]),
                      THPVariable_Unpack(arguments[2]),
                      THPVariable_Unpack(arguments[3]),
                      THPVariable_Unpack(arguments[4]),
                      state_indices,
                      scale,
                      arguments[6] == Py_True};
  Tensor y;
  {
    const WithoutGil without_gil;
    y = gated_delta::call_step(in);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// For tests: which kernels calls take, a number of `Kernels`.
PyObject* choose_kernels(PyObject*, PyObject* number) {
  HANDLE_TH_ERRORS
#ifdef GATED_DELTA_WITH_CUDA
  chosen_kernels = static_cast<Kernels>(PyLong_AsLong(number));
#endif
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"choose_kernels", choose_kernels, METH_O, nullptr},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL,
     nullptr},
    {"call_step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_step)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, GATED_DELTA_STRING(TORCH_EXTENSION_NAME), nullptr, -1,
                      methods};

}  // namespace
}  // namespace gated_delta

PyMODINIT_FUNC GATED_DELTA_INIT(TORCH_EXTENSION_NAME)() {
  return PyModule_Create(&gated_delta::module);
}
#endif
"""

# ==================================================================================================================
# Building and loading
# ==================================================================================================================
#
# The library lies in <cache>/gated_delta_jit_<hash>_<variant>/, where the hash stands for everything that went into it
# and the variant names the GPU architectures that it holds, or is "cpu". A warm import looks for it, loads it and is
# done. A cold one compiles under a file lock, which the operating system drops when its holder dies, and moves the
# finished library into place in one step, so that no process ever sees half a library.

_CXX_FLAGS = ["-O3"]
_NVCC_FLAGS = ["-O3"]
_CUDA_PARTS, _CPP_PARTS = 8, 3  # of the sources, see GATED_DELTA_PART there

def _library_hash() -> str:
    """Stands for all that a compiled library depends on, apart from the GPU architectures."""
    parts = [CUDA_SOURCE, CPP_SOURCE, *_CXX_FLAGS, *_NVCC_FLAGS, str(_CUDA_PARTS), str(_CPP_PARTS)]
    parts += [torch.__version__, str(torch.version.cuda)]
    parts += [str(sysconfig.get_config_var("SOABI")), platform.machine(), __version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

def _cache_root() -> str:
    """The folder of compiled extensions: TORCH_EXTENSIONS_DIR, or torch's own default."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    return os.path.abspath(os.environ.get("TORCH_EXTENSIONS_DIR") or default)

class _explain(contextlib.AbstractContextManager):
    """Turns exceptions of the given kinds into a RuntimeError that begins with `advice`."""

    def __init__(self, kinds: type[BaseException] | tuple[type[BaseException], ...], advice: str) -> None:
        self.kinds = kinds
        self.advice = advice

    def __exit__(self, kind, error, traceback) -> None:
        if kind is not None and issubclass(kind, self.kinds):
            raise RuntimeError(f"gated_delta_jit: {self.advice}\n{error}") from None

def _visible_architectures() -> list[str]:
    """Compute capabilities of this machine's GPUs, such as ["90"], read from NVML: no CUDA context, no cuInit."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    architectures = set()
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            major = ctypes.c_int()
            minor = ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                continue
            if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                architectures.add(f"{major.value}{minor.value}")
        nvml.nvmlShutdown()
    return sorted(architectures, key=int)

def _wanted_architectures() -> list[str]:
    """Architectures to build for, such as ["80", "90a", "100ptx"]: TORCH_CUDA_ARCH_LIST, else this machine's GPUs."""
    if torch.version.cuda is None:
        return []
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(",", ";").replace(" ", ";")
    names = [name for name in listed.split(";") if name]
    if not names:
        return _visible_architectures()
    wanted = set()
    for name in names:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", name)
        if match is None:
            raise RuntimeError(
                "gated_delta_jit: TORCH_CUDA_ARCH_LIST must hold compute capabilities such as '8.0;9.0' or '9.0+PTX', "
                f"got {os.environ['TORCH_CUDA_ARCH_LIST']!r}"
            )
        wanted.add(f"{match[1]}{match[2]}{match[3]}{'ptx' if match[4] else ''}")
    return sorted(wanted, key=lambda name: (int(re.match(r"\d+", name)[0]), name))

def _covers(variant: str, wanted: list[str]) -> bool:
    """Can a library of this variant run on every wanted architecture?"""
    held = [re.fullmatch(r"sm(\d+)(\d)([af]?)(ptx)?", name) for name in variant.split("_")]

    def runs_on(have: re.Match | None, want: str) -> bool:
        if have is None:
            return False
        major, minor, exact, ptx = int(have[1]), int(have[2]), have[3], have[4]
        match = re.fullmatch(r"(\d+)(\d)([af]?)(ptx)?", want)
        want_major, want_minor = int(match[1]), int(match[2])
        if exact or match[3] or match[4]:
            same = (major, minor) == (want_major, want_minor)
            return have[0] == f"sm{want}" or (bool(exact) and same and not match[3] and not match[4])
        same_family = major == want_major and minor <= want_minor
        return same_family or (ptx is not None and (major, minor) <= (want_major, want_minor))

    return all(any(runs_on(have, want) for have in held) for want in wanted)

def _find_library(root: str, stem: str, wanted: list[str]) -> str | None:
    """Path of a finished library that serves this machine, or None."""
    exact = "_".join(f"sm{name}" for name in wanted) or "cpu"
    found = []
    with contextlib.suppress(OSError):
        found = sorted(entry for entry in os.listdir(root) if entry.startswith(f"{stem}_"))
    for entry in sorted(found, key=lambda entry: entry != f"{stem}_{exact}"):
        path = os.path.join(root, entry, f"{entry}.so")
        if os.path.isfile(path) and _covers(entry[len(stem) + 1 :], wanted):
            return path
    return None

def _toolkit() -> str | None:
    """The CUDA toolkit's folder: CUDA_HOME, CUDA_PATH, the one behind the nvcc on PATH, or /usr/local/cuda."""

    def complete(home: str | None) -> bool:
        if not home:
            return False
        return os.path.isfile(os.path.join(home, "bin", "nvcc")) and os.path.isdir(os.path.join(home, "include"))

    for name in ("CUDA_HOME", "CUDA_PATH"):
        if complete(os.environ.get(name)):
            return os.environ[name]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        home = os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
        if complete(home) and os.path.isfile(os.path.join(home, "include", "cuda_runtime.h")):
            return home
        # A wrapper script: nvcc itself says where its toolkit is.
        said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
        top = re.search(r"^#\$ TOP=(.*)$", said.stderr, re.MULTILINE)
        if top is not None and complete(os.path.realpath(top[1].strip())):
            return os.path.realpath(top[1].strip())
    return "/usr/local/cuda" if complete("/usr/local/cuda") else None

@contextlib.contextmanager
def _file_lock(path: str):
    """Holds an exclusive lock on a file. The system releases it with its holder; a file left behind means nothing."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

@contextlib.contextmanager
def _environment(**values: str):
    """Sets environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    with contextlib.ExitStack() as stack:
        stack.callback(restore)
        os.environ.update(values)
        yield

def _compile(name: str, folder: str, architectures: list[str], toolkit: str | None) -> None:
    """Builds <folder>/<name>.so. The caller holds the lock."""
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        raise RuntimeError(
            f"gated_delta_jit: no C++ compiler: {compiler!r} is not on PATH. Install one (Debian: apt-get install g++) "
            "or set CXX."
        )
    path = os.environ.get("PATH", os.defpath)
    if importlib.util.find_spec("ninja") is not None:
        path = f"{importlib.import_module('ninja').BIN_DIR}{os.pathsep}{path}"
    if shutil.which("ninja", path=path) is None:
        raise RuntimeError("gated_delta_jit: ninja is missing. Install it with: pip install ninja")
    # torch.utils.cpp_extension asks for a GPU when it is imported: let it ask NVML, and keep its remark on the answer,
    # which it prints or logs.
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        stack.enter_context(_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"))
        stack.enter_context(contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        from torch.utils import cpp_extension

    cxx_flags = list(_CXX_FLAGS)
    said = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" in said and sys.platform == "linux":
        cxx_flags.append("-fopenmp")  # at::parallel_for runs on torch's own threads, through its copy of the runtime
    # Parts of a source compile side by side.
    sources = {
        f"gated_delta_part{part}.cpp": f'#define GATED_DELTA_PART {part}\n#line 1 "gated_delta.cpp"\n{CPP_SOURCE}'
        for part in range(1, _CPP_PARTS + 1)
    }
    options = {"extra_cflags": cxx_flags, "with_cuda": bool(architectures)}
    if architectures:
        cxx_flags.append("-DGATED_DELTA_WITH_CUDA")
        nvcc_flags = list(_NVCC_FLAGS)
        command = [os.path.join(toolkit, "bin", "nvcc"), "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        release = re.search(r"release (\d+)\.(\d+)", said)
        if release is not None and (int(release[1]), int(release[2])) >= (12, 4):
            nvcc_flags.append("--split-compile=0")  # kernels side by side on all cores
        for architecture in architectures:
            number = architecture.removesuffix("ptx")
            exact = "90a" if number == "90" else number  # runs on the same chips, and has wgmma
            nvcc_flags.append(f"-gencode=arch=compute_{exact},code=sm_{exact}")
            if architecture.endswith("ptx"):
                nvcc_flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
                nvcc_flags.append("-DGATED_DELTA_FOR_LATER_CHIPS")
        options["extra_cuda_cflags"] = nvcc_flags
        for part in range(1, _CUDA_PARTS + 1):
            text = f'#define GATED_DELTA_PART {part}\n#line 1 "gated_delta.cu"\n{CUDA_SOURCE}'
            sources[f"gated_delta_kernels{part}.cu"] = text

    build = os.path.join(folder, "build")
    os.makedirs(build, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(build, "lock"))  # torch's own, left by a build that was killed: only ours counts
    advice = (
        "compiling failed. The compiler's words are below; its lines are those of the files that "
        "`python gated_delta_jit.py --dump DIR` writes."
    )
    home_before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = toolkit or home_before
    with _explain(Exception, advice), _environment(PATH=path), contextlib.ExitStack() as cleanup:
        cleanup.callback(setattr, cpp_extension, "CUDA_HOME", home_before)
        for file_name, text in sources.items():
            with open(os.path.join(build, file_name), "w") as file:
                file.write(text)
        paths = [os.path.join(build, file_name) for file_name in sources]
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # of an attempt that failed
        cpp_extension.load(name=name, sources=paths, build_directory=build, **options)
    os.replace(os.path.join(build, f"{name}.so"), os.path.join(folder, f"{name}.so"))

def _load_library():
    """Finds or builds the compiled library and loads it, once in a process. Returns it, its path and what it lacks."""
    if sys.platform == "win32":
        raise RuntimeError("gated_delta_jit: Windows is not supported; use it under WSL 2.")
    root = _cache_root()
    stem = f"gated_delta_jit_{_library_hash()}"
    wanted = _wanted_architectures()
    path = _find_library(root, stem, wanted)
    lacks = ""
    if path is None:
        toolkit = _toolkit() if wanted else None
        if wanted and toolkit is None:
            lacks = "no nvcc was found (CUDA_HOME, PATH, /usr/local/cuda); install the CUDA toolkit"
            wanted = []
            path = _find_library(root, stem, wanted)
    if path is None:
        name = f"{stem}_{'_'.join(f'sm{each}' for each in wanted) or 'cpu'}"
        folder = os.path.join(root, name)
        path = os.path.join(folder, f"{name}.so")
        advice = f"the cache folder {root} can't be written; set TORCH_EXTENSIONS_DIR to a folder that can."
        with _explain(OSError, advice):
            os.makedirs(folder, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with _explain(OSError, advice):
                stack.enter_context(_file_lock(f"{folder}.lock"))
            if not os.path.isfile(path):
                kernels = "CUDA and CPU kernels" if wanted else "CPU kernels"
                note = f"; no CUDA kernels: {lacks}" if lacks else ""
                words = f"compiling {kernels}, about 30 s on 16 cores, into {folder}{note}"
                print(f"gated_delta_jit: {words}", file=sys.stderr)
                started = time.monotonic()
                _compile(name, folder, wanted, toolkit)
                print(f"gated_delta_jit: compiled in {time.monotonic() - started:.1f} s", file=sys.stderr)
    name = os.path.basename(path).removesuffix(".so")
    if not lacks and name.endswith("_cpu"):
        lacks = "torch was built without CUDA" if torch.version.cuda is None else "no GPU was visible when it was built"
    if name not in sys.modules:
        advice = f"{path} can't be loaded; delete {os.path.dirname(path)} and import again."
        with _explain(ImportError, advice):
            loader = importlib.machinery.ExtensionFileLoader(name, path)
            loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader)))
    library = sys.modules[name]  # Python enters an extension module there when it is initialised, by whomever
    if not hasattr(library, "fake_forward"):
        library.fake_forward = _fake_forward
        torch.library.register_fake(f"{name}::forward", _fake_forward)
        torch.library.register_fake(f"{name}::backward", _fake_backward)
        torch.library.register_fake(f"{name}::step", _fake_step)
    return library, path, lacks

# ==================================================================================================================
# The operator
# ==================================================================================================================

def _check_shapes(q, k, v, gate, initial_state, cu_seqlens=None) -> None:
    """What the C++ side checks of real tensors, for fake and meta tensors."""

    def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], may_broadcast: bool = False) -> None:
        fits = tensor.dim() == len(shape)
        for size, wanted in zip(tensor.shape, shape, strict=False):
            fits = fits and (size == wanted or (may_broadcast and size == 1))
        if not fits:
            raise ValueError(f"gated_delta: `{name}` must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
        if tensor.device != q.device:
            raise ValueError(f"gated_delta: `{name}` must be on q's device {q.device}, got {tensor.device}")

    if q.dim() != 4:
        raise ValueError(f"gated_delta: `q` must have the 4 dimensions (B, T, H, K), got shape {tuple(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"gated_delta: `v` must have the 4 dimensions (B, T, H, V), got shape {tuple(v.shape)}")
    B, T, row_heads, K = q.shape
    H, V = v.shape[2:]
    check("k", k, q.shape)
    if H != row_heads and (row_heads == 0 or H == 0 or H % row_heads != 0):
        H = row_heads
    check("v", v, (B, T, H, V))
    check("gate", gate, (B, T, H, V), may_broadcast=True)
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"gated_delta: `cu_seqlens` must be int32 or int64, got {cu_seqlens.dtype}")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            got = tuple(cu_seqlens.shape)
            raise ValueError(f"gated_delta: `cu_seqlens` must have shape (N + 1,), N at least 1, got {got}")
        check("cu_seqlens", cu_seqlens, cu_seqlens.shape)
        if B != 1:
            raise ValueError(f"gated_delta: `q` must have B = 1 beside cu_seqlens, got shape {tuple(q.shape)}")
    if initial_state is not None:
        check("initial_state", initial_state, _state_shape(q, v, cu_seqlens))

def _state_shape(q, v, cu_seqlens):
    return (q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, v.shape[2], q.shape[3], v.shape[3])

def _state_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32

def _fake_forward(q, k, v, gate, initial_state, scale, output_final_state, log_gate, cu_seqlens=None):
    """Shapes and dtypes of the results, for torch.compile, fake and meta tensors."""
    _check_shapes(q, k, v, gate, initial_state, cu_seqlens)
    state_shape = _state_shape(q, v, cu_seqlens) if output_final_state else (0,)
    y = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    return y, torch.empty(state_shape, dtype=_state_dtype(q), device=q.device)

def _fake_backward(q, k, v, gate, initial_state, dy, dfinal_state, scale, log_gate, needed, cu_seqlens=None):
    """Likewise for the gradients."""
    _check_shapes(q, k, v, gate, initial_state, cu_seqlens)
    shapes = (q.shape, k.shape, v.shape, gate.shape, _state_shape(q, v, cu_seqlens))
    dtypes = (q.dtype, q.dtype, q.dtype, gate.dtype, _state_dtype(q))
    return tuple(
        torch.empty(shape if wanted else (0,), dtype=dtype if wanted else q.dtype, device=q.device)
        for shape, dtype, wanted in zip(shapes, dtypes, needed, strict=True)
    )

def _fake_step(q, k, v, gate, state, state_indices, scale, log_gate):
    """Shape and dtype of a decode step's result."""

    def check(fits: bool, name: str, expected: str, tensor: torch.Tensor) -> None:
        if not fits:
            raise ValueError(f"gated_delta: `{name}` must have shape {expected}, got {tuple(tensor.shape)}")
        if tensor.device != q.device:
            raise ValueError(f"gated_delta: `{name}` must be on q's device {q.device}, got {tensor.device}")

    check(q.dim() == 3, "q", "(B, H, K)", q)
    check(k.shape == q.shape, "k", str(tuple(q.shape)), k)
    B, row_heads, K = q.shape
    fits = v.dim() == 3 and v.shape[0] == B
    fits = fits and (v.shape[1] == row_heads or (row_heads > 0 and v.shape[1] > 0 and v.shape[1] % row_heads == 0))
    check(fits, "v", "(B, H, V), B and H those of q or H a multiple", v)
    fits = gate.dim() == 3 and all(a == b or a == 1 for a, b in zip(gate.shape, v.shape, strict=True))
    check(fits, "gate", f"broadcastable to {tuple(v.shape)}", gate)
    fits = state.dim() == 4 and state.shape[1:] == (v.shape[1], K, v.shape[2])
    fits = fits and (state_indices is not None or state.shape[0] == B)
    check(fits, "state", f"({B if state_indices is None else 'pool'}, {v.shape[1]}, {K}, {v.shape[2]})", state)
    if state_indices is not None:
        check(state_indices.shape == (B,), "state_indices", f"({B},)", state_indices)
    return torch.empty(v.shape, dtype=q.dtype, device=q.device)

def _check_kinds(tensors, scale, **flags) -> None:
    """Refuses what the operator's schema would refuse with a message that helps less."""
    q = tensors["q"]
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"gated_delta: `{name}` must be a tensor, got {type(value).__name__}")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"gated_delta: `{name}` must be a bool, got {type(value).__name__}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"gated_delta: `scale` must be a number, got {type(scale).__name__}")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"gated_delta: `q` must be on a CPU or a CUDA device, got {q.device}")
    if q.device.type == "cuda" and not HAS_CUDA:
        raise RuntimeError(f"gated_delta: `q` is on {q.device}, but this build has no CUDA kernels: {_LACKS}")

def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    *,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    log_gate: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Value-gated linear recurrence over time, the whole sequence in one call.

        S_t[i, j] = gate_t[j] * S_{t-1}[i, j] + k_t[i] * v_t[j]
        y_t[j]    = scale * sum_i q_t[i] * S_t[i, j]

    Arguments:
        q, k: (B, T, H, K), float32, float64, float16 or bfloat16, with any strides. Grouped heads: (B, T, H / n, K),
            of which head h reads head h // n; their gradients are sums over the group.
        v: (B, T, H, V), the dtype and device of q.
        gate: broadcastable to (B, T, H, V), q's dtype, or float32 beside half-precision q, k, v. Plain numbers, not
            logarithms: any value is exact as long as products of consecutive gates stay in the state's range.
        scale: factor on y. Default 1 (flash-linear-attention's default is K ** -0.5).
        initial_state: (B, H, K, V), float32 (float64 beside float64 inputs). Default: zeros.
        output_final_state: also return the state after the last step. Default False.
        log_gate: `gate` holds natural logarithms of the gates, as flash-linear-attention's does. Default False.
        cu_seqlens: (N + 1,), int32 or int64, on q's device: N sequences packed along T, B = 1, as in
            flash-linear-attention. Sequence n has the steps from cu_seqlens[n] to cu_seqlens[n + 1], none where they
            are equal, and initial_state[n] and final_state[n]: both are (N, H, K, V). The first offset is 0, none is
            below the one before, the last is T. On a CPU anything else raises. On a GPU, where a call never waits,
            nobody looks: steps past the last offset give y = 0 and zero gradients; otherwise wrong offsets give wrong
            numbers, but touch no other memory. In a call without states a NaN or infinity may reach other sequences.

    Returns:
        (y, final_state): y (B, T, H, V) in q's dtype, contiguous; final_state (B, H, K, V) in the state's dtype, or
        None. All sums and the state are float32 (float64 for float64 inputs); y is rounded once. Where tensor cores
        serve, products read half-precision copies of a half-precision problem's state, and float32 operands in two
        parts. Results repeat to the bit.

    Errors:
        TypeError: an argument is no tensor, or its dtype is unsupported or doesn't go with q's.
        ValueError: a rank, shape or device doesn't go with q's.
        NotImplementedError: forward-mode differentiation, or a gradient of a gradient.
        RuntimeError: CUDA tensors, but the library was built without CUDA kernels.

    Differentiable in q, k, v, gate and initial_state. The gate's gradient is a sum of products like everything else, so
    it is as exact at gates of 0 as anywhere. Kept for the backward: the inputs and, where that is at most half as much
    again, states at every 64th step.

    This is what flash-linear-attention calls `gv` gating and the k-sweep of Gated Slot Attention (arXiv:2409.07146). It
    has no delta rule: for Gated DeltaNet (arXiv:2412.06464) it is the wrong operator.
    """
    if not torch.compiler.is_compiling():
        result = _call(q, k, v, gate, scale, initial_state, output_final_state, log_gate, cu_seqlens)
        if result is not NotImplemented:
            return result
        tensors = {"q": q, "k": k, "v": v, "gate": gate}
        if initial_state is not None:
            tensors["initial_state"] = initial_state
        if cu_seqlens is not None:
            tensors["cu_seqlens"] = cu_seqlens
        _check_kinds(tensors, scale, output_final_state=output_final_state, log_gate=log_gate)
    y, final_state = OPERATOR(q, k, v, gate, initial_state, scale, output_final_state, log_gate, cu_seqlens)
    return y, (final_state if output_final_state else None)

def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float = 1.0,
    log_gate: bool = False,
    state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of `gated_delta` for decoding: updates `state` in place and returns y.

    Arguments:
        q, k: (B, H, K), or (B, H / n, K) for grouped heads; types and strides as for `gated_delta`.
        v: (B, H, V), the dtype and device of q.
        gate: broadcastable to (B, H, V), q's dtype, or float32 beside half-precision q, k, v.
        state: (B, H, K, V), float32 (float64 beside float64 inputs), or q's dtype, which halves the time and rounds the
            state in every step. Any strides but those of an expanded tensor. It is overwritten.
        scale, log_gate: as for `gated_delta`.
        state_indices: (B,), int32 or int64. Then `state` is a pool (P, H, K, V), and batch b has its row
            state_indices[b]. A negative index is a padded slot: its y is 0, and no state is touched. An index that
            comes twice leaves its state undefined. An index of P or above raises on a CPU; on a GPU, where nobody can
            see it without waiting, its y is NaN, and no state is touched.

    Returns:
        y: (B, H, V) in q's dtype, contiguous, from the state before it is rounded to its dtype.

    Errors: those of `gated_delta`, and NotImplementedError where grad mode is on and an argument requires grad: the
    step is for inference.
    """
    if not torch.compiler.is_compiling():
        result = _call_step(q, k, v, gate, state, scale, log_gate, state_indices)
        if result is not NotImplemented:
            return result
        tensors = {"q": q, "k": k, "v": v, "gate": gate, "state": state}
        if state_indices is not None:
            tensors["state_indices"] = state_indices
        _check_kinds(tensors, scale, log_gate=log_gate)
    return OPERATOR_STEP(q, k, v, gate, state, state_indices, scale, log_gate)

class ModelNew(torch.nn.Module):
    """`gated_delta` as a module without parameters: scale 1, zero state, y alone. KernelBench's name for it."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_delta(q, k, v, gate)[0]

def _main(arguments: list[str]) -> None:
    """`--dump DIR` writes the CUDA and C++ texts; anything else prints how to use it."""
    if len(arguments) != 2 or arguments[0] != "--dump":
        raise SystemExit("usage: python gated_delta_jit.py --dump DIR    write gated_delta.cu and gated_delta.cpp")
    os.makedirs(arguments[1], exist_ok=True)
    for name, source in {"gated_delta.cu": CUDA_SOURCE, "gated_delta.cpp": CPP_SOURCE}.items():
        with open(os.path.join(arguments[1], name), "w") as file:
            file.write(source)

if __name__ == "__main__":
    _main(sys.argv[1:])
else:
    _library, LIBRARY, _LACKS = _load_library()
    _call = _library.call
    _call_step = _library.call_step
    OPERATOR = getattr(torch.ops, _library.__name__).forward.default
    OPERATOR_BACKWARD = getattr(torch.ops, _library.__name__).backward.default
    OPERATOR_STEP = getattr(torch.ops, _library.__name__).step.default
    HAS_CUDA = not _library.__name__.endswith("_cpu")
