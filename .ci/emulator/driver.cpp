// Tests of launch_forward and launch_backward on the emulator, against plain float64 loops.
#include <cuda_runtime.h>

#include "contract.h"

#include <chrono>
#include <cinttypes>
#include <deque>
#include <map>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace gated_delta {
cudaError_t launch_forward(const Params& p, cudaStream_t stream);
cudaError_t launch_step(const StepParams& p, cudaStream_t stream);
int64_t marks_bytes(const Params& p);
cudaError_t launch_marks(Params& p, const void* offsets, int64_t stride, bool is_long, bool back, bool states,
                         void* memory, cudaStream_t stream);
Dtype gate_gradient_dtype(const Params& p);
cudaError_t launch_tails(const Params& p, const Gradients* grads, cudaStream_t stream);
#ifdef EMU_FORWARD_SCRATCH
int64_t forward_scratch_bytes(const Params& p);
#endif
}  // namespace gated_delta

using gated_delta::Dtype;
using gated_delta::Params;
using i64 = int64_t;

// ---------------------------------------- Random numbers --------------------------------------

struct Rng {
  uint64_t s;
  explicit Rng(uint64_t seed) : s(seed * 0x9E3779B97F4A7C15ull + 0x1234567) { for (int i = 0; i < 4; ++i) next(); }
  uint64_t next() {
    uint64_t z = s += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  double uniform() { return (next() >> 11) * 0x1p-53; }
  double normal() {  // nearly: enough here
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  i64 below(i64 n) { return static_cast<i64>(next() % static_cast<uint64_t>(n)); }
  bool chance(double p) { return uniform() < p; }
  template <class T> T pick(std::initializer_list<T> list) { return *(list.begin() + below(list.size())); }
};

// ------------------------------------------- Types --------------------------------------------

int size_of(Dtype d) { return d == Dtype::kFloat64 ? 8 : d == Dtype::kFloat32 ? 4 : 2; }
const char* name_of(Dtype d) {
  return d == Dtype::kFloat64 ? "float64" : d == Dtype::kFloat32 ? "float32" : d == Dtype::kFloat16 ? "float16" : "bfloat16";
}
Dtype accum_of(Dtype d) { return d == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32; }
double unit(Dtype d) {
  return d == Dtype::kFloat64 ? 0x1p-53 : d == Dtype::kFloat32 ? 0x1p-24 : d == Dtype::kFloat16 ? 0x1p-11 : 0x1p-8;
}
double tiny(Dtype d) { return d == Dtype::kFloat64 ? 1e-300 : d == Dtype::kFloat16 ? 6e-8 : 1e-36; }

double load(const unsigned char* p, Dtype d) {
  switch (d) {
    case Dtype::kFloat64: { double x; memcpy(&x, p, 8); return x; }
    case Dtype::kFloat32: { float x; memcpy(&x, p, 4); return x; }
    case Dtype::kFloat16: { __half x; memcpy(static_cast<void*>(&x), p, 2); return __half2float(x); }
    default: { __nv_bfloat16 x; memcpy(static_cast<void*>(&x), p, 2); return __bfloat162float(x); }
  }
}
void store(unsigned char* p, Dtype d, double x) {
  switch (d) {
    case Dtype::kFloat64: memcpy(p, &x, 8); break;
    case Dtype::kFloat32: { const float f = static_cast<float>(x); memcpy(p, &f, 4); break; }
    case Dtype::kFloat16: { const __half h = __float2half_rn(static_cast<float>(x)); memcpy(p, &h, 2); break; }
    default: { const __nv_bfloat16 b = __float2bfloat16_rn(static_cast<float>(x)); memcpy(p, &b, 2); break; }
  }
}

// -------------------------------- Operands: exact allocations ---------------------------------

struct Layout {
  const char* name = "contiguous";
  int order[4] = {0, 1, 2, 3};   // axes from the slowest to the fastest in memory
  i64 pad = 0;                   // elements after each row of the fastest axis
  i64 step = 1;                  // stride of the fastest axis
  bool expand[4] = {};           // stride 0
  i64 lead = 0;                  // elements before the first: an operand off its alignment
};

struct Operand {
  std::string name;
  Dtype dtype = Dtype::kFloat32;
  i64 shape[4] = {0, 0, 0, 0}, stride[4] = {0, 0, 0, 0};
  unsigned char* memory = nullptr;
  unsigned char* base = nullptr;
  i64 span = 0, lead = 0;  // elements
  std::vector<unsigned char> copy;
  Layout layout;

  Operand() = default;
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;
  ~Operand() { free(memory); }

  i64 elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  bool used() const { return memory != nullptr; }

  // Poisons all of it.
  void make(const std::string& n, Dtype d, std::initializer_list<i64> sizes, const Layout& l = Layout{}) {
    name = n;
    dtype = d;
    layout = l;
    std::copy(sizes.begin(), sizes.end(), shape);
    i64 next = l.step;
    bool first = true;
    for (int i = 3; i >= 0; --i) {
      const int axis = l.order[i];
      if (l.expand[axis]) {
        stride[axis] = 0;
        continue;
      }
      stride[axis] = next;
      next *= std::max<i64>(shape[axis], 1);
      if (first) next += l.pad;
      first = false;
    }
    span = 1;
    for (int axis = 0; axis < 4; ++axis) span += (shape[axis] - 1) * stride[axis];
    if (elements() == 0) span = 0;
    lead = l.lead;
    const size_t bytes = (lead + span) * size_of(d);
    memory = static_cast<unsigned char*>(malloc(std::max<size_t>(bytes, 1)));
    memset(memory, 0xFF, bytes);
    base = memory + lead * size_of(d);
    emu::track(base, span * size_of(d), name.c_str());
  }
  unsigned char* at(i64 a, i64 b, i64 c, i64 e) const {
    return base + (a * stride[0] + b * stride[1] + c * stride[2] + e * stride[3]) * size_of(dtype);
  }
  double get(i64 a, i64 b, i64 c, i64 e) const { return load(at(a, b, c, e), dtype); }
  template <class F> void each(const F& f) const {
    for (i64 a = 0; a < shape[0]; ++a)
      for (i64 b = 0; b < shape[1]; ++b)
        for (i64 c = 0; c < shape[2]; ++c)
          for (i64 e = 0; e < shape[3]; ++e) f(a, b, c, e);
  }
  template <class F> void fill(const F& value) {
    each([&](i64 a, i64 b, i64 c, i64 e) { store(at(a, b, c, e), dtype, value()); });
  }
  void poison() { memset(memory, 0xFF, (lead + span) * size_of(dtype)); }
  void remember() { copy.assign(memory, memory + (lead + span) * size_of(dtype)); }
  bool unchanged() const { return copy.empty() || memcmp(copy.data(), memory, copy.size()) == 0; }
  // Nothing between the elements was written.
  bool gaps_intact() const {
    std::vector<bool> mine(lead + span);
    each([&](i64 a, i64 b, i64 c, i64 e) { mine[(at(a, b, c, e) - memory) / size_of(dtype)] = true; });
    for (i64 i = 0; i < lead + span; ++i) {
      if (mine[i]) continue;
      for (int byte = 0; byte < size_of(dtype); ++byte) {
        if (memory[i * size_of(dtype) + byte] != 0xFF) return false;
      }
    }
    return true;
  }
  std::vector<double> dense() const {
    std::vector<double> out;
    out.reserve(elements());
    each([&](i64 a, i64 b, i64 c, i64 e) { out.push_back(get(a, b, c, e)); });
    return out;
  }
  gated_delta::View<i64> view() const {
    gated_delta::View<i64> v;
    v.data = used() ? base : nullptr;
    for (int axis = 0; axis < 4; ++axis) v.stride[axis] = used() ? stride[axis] : 0;
    return v;
  }
  std::string describe() const {
    char text[160];
    snprintf(text, sizeof text, " %s:%s(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ")%s", name.c_str(), layout.name, stride[0],
             stride[1], stride[2], stride[3], lead ? "+off" : "");
    return text;
  }
};

// With `in_chunks` one of those that tensor cores can read, the gate's also with one element for all channels.
Layout input_layout(Rng& rng, const i64 (&sizes)[4], bool may_expand, bool in_chunks, bool is_gate) {
  Layout l;
  if (in_chunks) {
    const i64 kind = rng.below(is_gate ? 4 : 3);
    if (kind == 0) {
      l.name = "padded";
      l.pad = rng.pick<i64>({8, 16, 32});
    } else if (kind == 1) {
      l.name = "BHTC";
      l.order[1] = 2;
      l.order[2] = 1;
    } else {
      l.name = "expanded";
      for (int axis = 0; axis < 3; ++axis) l.expand[axis] = rng.chance(0.4);
      l.expand[3] = kind == 3;
      if (kind == 2) l.expand[rng.below(3)] = true;
    }
    return l;
  }
  switch (rng.below(may_expand ? 8 : 6)) {
    case 0: case 1:
      l.name = "padded";
      l.pad = rng.pick<i64>({8, 16, 32, 3});
      break;
    case 2: {
      l.name = "BHTC";
      const int order[4] = {0, 2, 1, 3};
      std::copy(order, order + 4, l.order);
      break;
    }
    case 3: {
      l.name = "channels-slow";
      const int order[4] = {0, 2, 3, 1};
      std::copy(order, order + 4, l.order);
      break;
    }
    case 4:
      l.name = "off-alignment";
      l.lead = rng.pick<i64>({1, 2, 3, 8});
      break;
    case 5:
      l.name = "every-other";
      l.step = 2;
      break;
    default:
      l.name = "expanded";
      for (int axis = 0; axis < 4; ++axis) l.expand[axis] = rng.chance(0.4);
      l.expand[rng.below(4)] = true;
  }
  (void)sizes;
  return l;
}

// ------------------------------------------ Problems ------------------------------------------

struct Spec {
  i64 B = 1, T = 1, H = 1, K = 1, V = 1;
  i64 group = 1;  // heads that share one head of q and k
  std::vector<i64> lengths;  // of packed sequences, B = 1; the rest of T is nobody's
  bool long_offsets = false;
  bool wrong_offsets = false;  // that make no sense: nothing but access out of bounds counts
  gated_delta::Kernels kernels = gated_delta::Kernels::kByRule;
  bool in_chunks() const { return segments > 0 || kernels == gated_delta::Kernels::kTensorCores; }
  i64 states() const { return lengths.empty() ? B : static_cast<i64>(lengths.size()); }
  Dtype dtype = Dtype::kFloat32, gate_dtype = Dtype::kFloat32;
  bool log_gate = false, has_initial = false, wants_final = false, strided = false, strided_outputs = false;
  // Backward. An absent dy counts as zero; the other flags say which gradients are asked for.
  bool has_dy = true, has_dfinal = false, wants_dinitial = false;
  bool wants_dq = true, wants_dk = true, wants_dv = true, wants_dgate = true;
  double scale = 1;
  int gates = 0;
  int processors = 132;
  int segments = 0;  // that the tensor cores' kernel has to run in; 0: no matter which kernel runs
  uint64_t seed = 0;

  std::string describe() const {
    static const char* const kinds[] = {"0.5..1", "near 1", "zeros and negative", "tiny", "0..1"};
    char text[500];
    snprintf(text, sizeof text, "B=%" PRId64 " T=%" PRId64 " H=%" PRId64 " K=%" PRId64 " V=%" PRId64
             " group %" PRId64 " %s gate %s%s (%s) scale %.4g%s%s%s%s%s%s%s%s%s processors %d",
             B, T, H, K, V, group, name_of(dtype), name_of(gate_dtype), log_gate ? " log" : "", kinds[gates], scale,
             has_initial ? " +initial" : "", wants_final ? " +final" : "", has_dfinal ? " +dfinal" : "",
             wants_dinitial ? " +dinitial" : "", has_dy ? "" : " -dy", wants_dq ? "" : " -dq", wants_dk ? "" : " -dk",
             wants_dv ? "" : " -dv", wants_dgate ? "" : " -dgate", processors);
    std::string all = text;
    for (size_t n = 0; n < lengths.size() && n < 40; ++n) all += (n == 0 ? " packed " : ",") + std::to_string(lengths[n]);
    if (wrong_offsets) all += " wrong offsets";
    if (kernels != gated_delta::Kernels::kByRule) all += kernels == gated_delta::Kernels::kSimt ? " SIMT" : " tensor cores";
    return all;
  }
};

struct Problem;
Params shared_arguments(const Problem& p);

struct Problem {
  Spec s;
  Operand q, k, v, gate, initial;                 // inputs
  Operand y, final;                               // outputs of the forward operator
  Operand dy, dfinal;                             // inputs of the backward operator
  Operand dq, dk, dv, dgate, dinitial;            // its outputs
  std::deque<Operand> workspaces;

  // For launchers that want scratch memory: exact and poisoned. Contiguous strides of the given shape.
  Operand& workspace(const std::string& name, Dtype dtype, std::initializer_list<i64> shape) {
    workspaces.emplace_back();
    workspaces.back().make(name, dtype, shape);
    return workspaces.back();
  }

  void drop_workspaces() {
    for (Operand& x : workspaces) emu::untrack(x.base);
    workspaces.clear();
  }

  std::vector<Operand*> inputs() { return {&q, &k, &v, &gate, &initial, &dy, &dfinal}; }
  std::vector<Operand*> outputs() { return {&y, &final, &dq, &dk, &dv, &dgate, &dinitial}; }

  Problem(const Spec& spec, bool backward) : s(spec) {
    emu::untrack_all();
    Rng rng(s.seed);
    const i64 rows[4] = {s.B, s.T, s.H / s.group, s.K}, columns[4] = {s.B, s.T, s.H, s.V}, state[4] = {s.states(), s.H, s.K, s.V};
    const auto layout = [&](const i64(&sizes)[4], bool expand, bool is_gate = false) {
      return s.strided && rng.chance(0.6) ? input_layout(rng, sizes, expand, s.in_chunks(), is_gate) : Layout{};
    };
    const auto output_layout = [&] {
      Layout l;
      if (s.strided_outputs && rng.chance(0.5)) {
        l.name = "padded";
        l.pad = s.in_chunks() ? rng.pick<i64>({8, 16}) : rng.pick<i64>({8, 16, 3});
      }
      return l;
    };
    const Dtype accum = accum_of(s.dtype);
    q.make("q", s.dtype, {s.B, s.T, s.H / s.group, s.K}, layout(rows, true));
    k.make("k", s.dtype, {s.B, s.T, s.H / s.group, s.K}, layout(rows, true));
    v.make("v", s.dtype, {s.B, s.T, s.H, s.V}, layout(columns, true));
    gate.make("gate", s.gate_dtype, {s.B, s.T, s.H, s.V}, layout(columns, true, true));
    if (s.has_initial) initial.make("initial", accum, {s.states(), s.H, s.K, s.V}, layout(state, true));
    for (Operand* x : {&q, &k, &v, &initial}) {
      if (x->used()) x->fill([&] { return rng.normal(); });
    }
    gate.fill([&] {
      double g;
      switch (s.gates) {
        case 0: g = 0.5 + 0.5 * rng.uniform(); break;
        case 1: g = 0.98 + 0.02 * rng.uniform(); break;
        case 2: g = rng.chance(0.2) ? 0 : 2 * rng.uniform() - 1; break;
        case 3: g = rng.chance(0.5) ? 1e-20 : 0.5 + 0.5 * rng.uniform(); break;
        default: g = rng.uniform();
      }
      if (s.gate_dtype == Dtype::kFloat16 && std::fabs(g) < 1e-4 && g != 0) g = 1e-4;
      return s.log_gate ? std::log(std::max(std::fabs(g), 1e-20)) : g;
    });
    if (!backward) {
      y.make("y", s.dtype, {s.B, s.T, s.H, s.V}, output_layout());
      if (s.wants_final) {
        Layout l = output_layout();
        if (s.strided_outputs && rng.chance(0.3)) {
          l.name = "transposed";
          l.order[2] = 3;
          l.order[3] = 2;
        }
        final.make("final", accum, {s.states(), s.H, s.K, s.V}, l);
      }
    } else {
      if (s.has_dy) dy.make("dy", s.dtype, {s.B, s.T, s.H, s.V}, layout(columns, true));
      if (s.has_dfinal) dfinal.make("dfinal", accum, {s.states(), s.H, s.K, s.V}, layout(state, true));
      for (Operand* x : {&dy, &dfinal}) {
        if (x->used()) x->fill([&] { return rng.normal(); });
      }
      if (s.wants_dq) dq.make("dq", s.dtype, {s.B, s.T, s.H, s.K}, output_layout());
      if (s.wants_dk) dk.make("dk", s.dtype, {s.B, s.T, s.H, s.K}, output_layout());
      if (s.wants_dv) dv.make("dv", s.dtype, {s.B, s.T, s.H, s.V}, output_layout());
      // Tensor cores leave the gate's gradient in the gate's dtype.
      Params a = shared_arguments(*this);
      const i64 border = 0;
      a.sequences = s.lengths.size();
      if (a.sequences > 0 && (s.has_initial || s.has_dfinal)) a.borders = &border;
      if (s.wants_dgate) dgate.make("dgate", gated_delta::gate_gradient_dtype(a), {s.B, s.T, s.H, s.V}, output_layout());
      if (s.wants_dinitial) dinitial.make("dinitial", accum, {s.states(), s.H, s.K, s.V}, output_layout());
    }
    for (Operand* x : inputs()) {
      if (x->used()) x->remember();
    }
    offsets = {0};
    for (i64 length : s.lengths) offsets.push_back(offsets.back() + length);
    if (s.wrong_offsets)
      for (i64& offset : offsets)
        if (rng.chance(0.6)) offset = rng.chance(0.3) ? (rng.chance(0.5) ? INT32_MIN : INT32_MAX) : rng.below(s.T + 40) - 20;
    short_offsets.assign(offsets.begin(), offsets.end());
    emu::track(offsets.data(), offsets.size() * 8, "offsets");
    emu::track(short_offsets.data(), offsets.size() * 4, "offsets");
  }
  std::vector<i64> offsets;
  std::vector<int32_t> short_offsets;

  // What goes before all launches of packed sequences, and after them.
  cudaError_t begin_packed(Params& a, bool back, bool states) {
    if (s.lengths.empty()) return cudaSuccess;
    a.sequences = s.lengths.size();
    const i64 bytes = gated_delta::marks_bytes(a);
    Operand& marks = workspace("marks", Dtype::kFloat32, {1, 1, 1, bytes / 4});
    const void* from = s.long_offsets ? static_cast<const void*>(offsets.data()) : short_offsets.data();
    return gated_delta::launch_marks(a, from, 1, s.long_offsets, back, states, marks.base, nullptr);
  }
  cudaError_t finish_packed(const Params& a, const gated_delta::Gradients* grads) {
    return s.lengths.empty() ? cudaSuccess : gated_delta::launch_tails(a, grads, nullptr);
  }
  std::string layouts() {
    std::string text;
    for (Operand* x : inputs()) if (x->used()) text += x->describe();
    for (Operand* x : outputs()) if (x->used() && x->layout.name != Layout{}.name) text += x->describe();
    return text;
  }
};

// ------------------------------------------ Reference -----------------------------------------
// Dense float64 arrays: q, k (B, T, H, K); v, gate, dy (B, T, H, V); states (B, H, K, V). With `absolute`, all
// factors by their absolute values: the scale of rounding errors, element by element.

struct Dense {
  i64 B, T, H, K, V, states;
  double scale;
  struct Span { i64 batch, start, steps, state; };
  std::vector<Span> spans;
  std::vector<double> q, k, v, gate, initial, dy, dfinal;  // gate: plain, the exponential already taken
  std::vector<double> y, final, dq, dk, dv, dgate, dinitial;

  Dense(const Problem& p, bool absolute) : B(p.s.B), T(p.s.T), H(p.s.H), K(p.s.K), V(p.s.V), states(p.s.states()), scale(p.s.scale) {
    for (i64 n = 0; n < states; ++n)
      spans.push_back(p.s.lengths.empty() ? Span{n, 0, T, n} : Span{0, p.offsets[n], p.s.lengths[n], n});
    q = of_all_heads(p.q.dense(), p.s.group);
    k = of_all_heads(p.k.dense(), p.s.group);
    v = p.v.dense();
    gate = p.gate.dense();
    if (p.s.log_gate) for (double& g : gate) g = std::exp(g);
    initial = p.initial.used() ? p.initial.dense() : std::vector<double>(states * H * K * V);
    dy = p.dy.used() ? p.dy.dense() : std::vector<double>(B * T * H * V);
    dfinal = p.dfinal.used() ? p.dfinal.dense() : std::vector<double>(states * H * K * V);
    if (absolute) {
      for (auto* x : {&q, &k, &v, &gate, &initial, &dy, &dfinal})
        for (double& e : *x) e = std::fabs(e);
      scale = std::fabs(scale);
    }
  }

  // Rows of q or k for each of H heads.
  std::vector<double> of_all_heads(const std::vector<double>& rows, i64 group) const {
    std::vector<double> out;
    out.reserve(rows.size() * group);
    for (size_t row = 0; K > 0 && row < rows.size() / K; ++row)
      for (i64 n = 0; n < group; ++n) out.insert(out.end(), &rows[row * K], &rows[row * K] + K);
    return out;
  }

  void forward() {
    y.assign(B * T * H * V, 0);
    final.assign(states * H * K * V, 0);
    std::vector<double> S(K * V);
    for (const Span& span : spans) for (i64 h = 0; h < H; ++h) {
      std::copy_n(&initial[0] + (span.state * H + h) * K * V, K * V, S.begin());
      for (i64 t = span.start; t < span.start + span.steps; ++t) {
        const i64 row = (span.batch * T + t) * H + h;
        step(S.data(), row);
        double* out = &y[row * V];
        for (i64 i = 0; i < K; ++i) for (i64 j = 0; j < V; ++j) out[j] += q[row * K + i] * S[i * V + j];
        for (i64 j = 0; j < V; ++j) out[j] *= scale;
      }
      std::copy_n(S.begin(), K * V, final.begin() + (span.state * H + h) * K * V);
    }
  }
  void step(double* S, i64 row) const {
    for (i64 i = 0; i < K; ++i) for (i64 j = 0; j < V; ++j)
      S[i * V + j] = gate[row * V + j] * S[i * V + j] + k[row * K + i] * v[row * V + j];
  }

  //   R_t = scale q_t dy_t^T + R_{t+1} diag(gate_{t+1}), with R_T = scale q_T dy_T^T + dfinal
  //   dq_t = scale S_t dy_t, dk_t = R_t v_t, dv_t = R_t^T k_t,
  //   dgate_t[j] = sum_i S_{t-1}[i,j] R_t[i,j], dinitial = R_1 diag(gate_1); for log gates dgate * gate.
  void backward(bool log_gate) {
    dq.assign(B * T * H * K, 0);
    dk.assign(B * T * H * K, 0);
    dv.assign(B * T * H * V, 0);
    dgate.assign(B * T * H * V, 0);
    dinitial.assign(states * H * K * V, 0);
    std::vector<double> S((T + 1) * K * V), R(K * V);
    for (const Span& span : spans) for (i64 h = 0; h < H; ++h) {
      std::copy_n(&initial[0] + (span.state * H + h) * K * V, K * V, S.begin());
      for (i64 t = 0; t < span.steps; ++t) {
        std::copy_n(&S[t * K * V], K * V, &S[(t + 1) * K * V]);
        step(&S[(t + 1) * K * V], (span.batch * T + span.start + t) * H + h);
      }
      std::copy_n(&dfinal[0] + (span.state * H + h) * K * V, K * V, R.begin());
      for (i64 t = span.steps - 1; t >= 0; --t) {
        const i64 row = (span.batch * T + span.start + t) * H + h;
        const double* before = &S[t * K * V];
        const double* now = &S[(t + 1) * K * V];
        for (i64 i = 0; i < K; ++i) {
          double sum_q = 0, sum_k = 0;
          for (i64 j = 0; j < V; ++j) {
            double& r = R[i * V + j];
            r += scale * q[row * K + i] * dy[row * V + j];
            sum_q += now[i * V + j] * dy[row * V + j];
            sum_k += r * v[row * V + j];
            dv[row * V + j] += r * k[row * K + i];
            dgate[row * V + j] += before[i * V + j] * r;
            r *= gate[row * V + j];
          }
          dq[row * K + i] = scale * sum_q;
          dk[row * K + i] = sum_k;
        }
        if (log_gate) for (i64 j = 0; j < V; ++j) dgate[row * V + j] *= gate[row * V + j];
      }
      std::copy_n(R.begin(), K * V, dinitial.begin() + (span.state * H + h) * K * V);
    }
  }
};

// ------------------------------------------- Calls --------------------------------------------

// What forward and backward calls share.
Params shared_arguments(const Problem& p) {
  Params a;
  a.q = p.q.view();
  a.k = p.k.view();
  a.v = p.v.view();
  a.gate = p.gate.view();
  a.B = p.s.B;
  a.T = p.s.T;
  a.H = p.s.H;
  a.K = p.s.K;
  a.V = p.s.V;
  a.group = p.s.group;
  a.dtype = p.s.dtype;
  a.gate_dtype = p.s.gate_dtype;
  a.log_gate = p.s.log_gate;
  a.scale = p.s.scale;
  a.initial_state = p.initial.view();
  return a;
}

cudaError_t call_forward(Problem& p) {
  Params a = shared_arguments(p);
  a.y = p.y.view();
  a.final_state = p.final.view();
  cudaError_t error = p.begin_packed(a, false, p.s.has_initial || p.s.wants_final);
  if (error != cudaSuccess) return error;
  if (p.s.K > gated_delta::max_rows(p.s.dtype))
    a.partial = p.workspace("partial", accum_of(p.s.dtype), {p.s.B, p.s.T, p.s.H, p.s.V}).view();
#ifdef EMU_FORWARD_SCRATCH
  const int64_t bytes = gated_delta::forward_scratch_bytes(a);
  if (bytes > 0) a.scratch = p.workspace("scratch", Dtype::kFloat32, {1, 1, 1, bytes / 4}).base;
#endif
  error = gated_delta::launch_forward(a, nullptr);
  return error == cudaSuccess ? p.finish_packed(a, nullptr) : error;
}

#ifdef EMU_BACKWARD
#include "backward_call.h"
#else
cudaError_t call_backward(Problem&) { return cudaErrorNotSupported; }
#endif

// ----------------------------------------- Comparison -----------------------------------------

double bar_factor = 1;
std::map<std::string, double> worst;  // of error / bound, and norms

// Rounding of what tensor cores multiply: float32 in three products of TF32 parts.
double tensor_unit(Dtype d) { return d == Dtype::kFloat32 ? 0x1p-21 : unit(d); }

// Every element within its bound, every element written, the norm of the error under the dtype's bar.
std::string compare(const Operand& got, const std::vector<double>& want, const std::vector<double>& size, double steps,
                    Dtype accum, double slack, double product_unit) {
  if (!got.used()) return "";
  const double u_out = unit(got.dtype), u = unit(accum);
  double error2 = 0, norm2 = 0, abs2 = 0;
  i64 n = 0, bad = 0, unwritten = 0;
  char text[400] = "";
  got.each([&](i64 a, i64 b, i64 c, i64 e) {
    const double x = got.get(a, b, c, e), ref = want[n], scale = size[n];
    const double bound = 1.01 * u_out * std::fabs(ref) + bar_factor * ((32 + steps) * u + 4 * product_unit) * scale + tiny(got.dtype) + tiny(accum);
    const double error = std::fabs(x - ref);
    uint64_t ones = ~0ull;
    if (memcmp(got.at(a, b, c, e), &ones, size_of(got.dtype)) == 0) ++unwritten;
    if (!(error <= bound)) {
      if (bad++ == 0)
        snprintf(text, sizeof text, "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] = %.9g, expected %.9g, error %.2e, bound %.2e",
                 got.name.c_str(), a, b, c, e, x, ref, error, bound);
    } else if (bound > 0) {
      double& w = worst[std::string("element error/bound ") + got.name + " " + name_of(got.dtype)];
      w = std::max(w, error / bound);
    }
    error2 += error * error;
    norm2 += ref * ref;
    abs2 += scale * scale;
    ++n;
  });
  std::string result;
  if (bad > 0) {
    result = text;
    snprintf(text, sizeof text, " (%" PRId64 " of %" PRId64 " elements wrong, %" PRId64 " unwritten)", bad, n, unwritten);
    return result + text;
  }
  if (n >= 256 && norm2 > 1e-60) {
    const double norm = std::sqrt(error2 / norm2);
    const double more = 2 * product_unit * std::sqrt(abs2 / norm2);
    const double bar = more + slack * bar_factor *
        (got.dtype == Dtype::kFloat64 ? 1e-14 : got.dtype == Dtype::kFloat32 ? 3e-7 : got.dtype == Dtype::kFloat16 ? 1e-3 : 2.5e-3);
    double& w = worst[std::string("norm error ") + got.name + " " + name_of(got.dtype)];
    w = std::max(w, norm);
    // Where sums cancel almost wholly no bar can hold.
    if (!(norm <= bar) && std::sqrt(norm2) > 0.02 * std::sqrt(abs2)) {
      snprintf(text, sizeof text, "%s: norm of the error %.2e of the norm, bar %.2e", got.name.c_str(), norm, bar);
      return text;
    }
  }
  if (!got.gaps_intact()) return got.name + ": wrote between the operand's elements";
  return "";
}

std::string current;  // the running case
extern "C" void emu_context() { fprintf(stderr, "emu: in %s\n", current.c_str()); }

struct Schedule { emu::Order order; uint64_t seed; const char* name; };
const Schedule kSchedules[] = {{emu::kForward, 0, "forward"}, {emu::kReverse, 0, "reverse"}, {emu::kRandom, 1, "random 1"},
                               {emu::kRandom, 2, "random 2"}, {emu::kRandom, 3, "random 3"}};

// Runs the case under each schedule; all results alike to the bit.
std::string run_case(const Spec& spec, bool backward, const std::vector<int>& schedules, std::string* detail) {
  emu::processors = spec.processors;
  gated_delta::chosen_kernels = spec.kernels;
  Problem p(spec, backward);
  *detail = p.layouts();
  current = spec.describe() + *detail;
  Dense want(p, false), size(p, true);
  bool referred = false;
  std::vector<std::vector<unsigned char>> first;
  for (int which : schedules) {
    emu::order = kSchedules[which].order;
    emu::seed = kSchedules[which].seed + spec.seed * 1000;
    for (Operand* x : p.outputs()) if (x->used()) x->poison();
    p.drop_workspaces();
    emu::errors.clear();
    const std::string label = std::string("[order ") + kSchedules[which].name + "] ";
    const uint64_t products = emu::counts.products, launches = emu::counts.launches;
    const cudaError_t error = backward ? call_backward(p) : call_forward(p);
    if (!emu::errors.empty()) return label + "ERROR: " + emu::errors[0] + " (" + std::to_string(emu::errors.size()) + " such messages)";
    if (error != cudaSuccess) return label + "the launch returned CUDA error " + std::to_string(error);
    if (spec.wrong_offsets) continue;
    // Older chips have too little shared memory for some.
    if (spec.segments > 0 && (emu::arch == 900 || emu::counts.products > products)) {
      if (emu::counts.products == products) return label + "meant for tensor cores, but they weren't used";
      const uint64_t kernels = emu::counts.launches - launches;
      const uint64_t walk = spec.segments > 1 ? 2 : 1;
      if (kernels != (backward ? 2 * walk + 1 : walk)) return label + std::to_string(kernels) + " kernels: not the segments meant";
      // The ends of segments: for whole tiles of columns, each warp's part of the state and two decays a lane.
      const size_t rows = spec.K <= 32 ? 32 : spec.K <= 64 ? 64 : spec.K <= 128 ? 128 : 256;
      const size_t columns = std::min<size_t>(rows, 128), tiles = (spec.V + columns - 1) / columns;
      const size_t parts = spec.dtype == Dtype::kFloat32 && rows <= 64 ? 2 : 1;  // warps that share 16 columns
      const size_t end = columns / 16 * parts * 32 * (rows / 2 / parts + 2);
      const size_t scratch = spec.segments > 1 ? spec.B * spec.H * spec.segments * tiles * end : 0;
      size_t got = 0;
      for (Operand& x : p.workspaces) got += x.name == "scratch" ? x.elements() : 0;
      if (!backward && got != scratch) return label + "scratch for " + std::to_string(got) + " numbers, " + std::to_string(scratch) + " expected";
    }
    for (Operand* x : p.inputs()) if (x->used() && !x->unchanged()) return label + "input " + x->name + " was modified";
    if (!first.empty()) {
      size_t i = 0;
      for (Operand* x : p.outputs()) {
        if (!x->used()) continue;
        if (memcmp(first[i].data(), x->memory, first[i].size()) != 0)
          return label + x->name + " differs from the result in order " + kSchedules[schedules[0]].name;
        ++i;
      }
      continue;
    }
    for (Operand* x : p.outputs())
      if (x->used()) first.emplace_back(x->memory, x->memory + (x->lead + x->span) * size_of(x->dtype));
    if (!referred) {
      referred = true;
      if (backward) {
        want.backward(spec.log_gate);
        size.backward(spec.log_gate);
      } else {
        want.forward();
        size.forward();
      }
    }
    const Dtype accum = accum_of(spec.dtype);
    const double steps = 0.5 * spec.T;
    // The rounding of an exponential repeats at every step where a log gate is the same for all; a gradient that
    // only decays (no dy), or a state's, has had T roundings. Neither is an error of the kernels.
    const double slack = (spec.log_gate ? 1 + spec.T / 16.0 : 1) * (spec.has_dy ? 1 : 2);
    const double product_unit = emu::counts.products > products ? tensor_unit(spec.dtype) : 0;
    std::string text;
    const auto both = [&](const Operand& x, const std::vector<double>& w, const std::vector<double>& z) {
      if (text.empty()) text = compare(x, w, z, steps, accum, slack, product_unit);
    };
    both(p.y, want.y, size.y);
    both(p.final, want.final, size.final);
    both(p.dq, want.dq, size.dq);
    both(p.dk, want.dk, size.dk);
    both(p.dv, want.dv, size.dv);
    both(p.dgate, want.dgate, size.dgate);
    both(p.dinitial, want.dinitial, size.dinitial);
    if (!text.empty()) return label + text;
  }
  return "";
}

// -------------------------------------------- Cases -------------------------------------------

std::vector<Spec> all_cases(bool backward, uint64_t seed, int rounds) {
  struct Pair { Dtype dtype, gate; };
  const Pair pairs[] = {{Dtype::kFloat32, Dtype::kFloat32}, {Dtype::kBFloat16, Dtype::kBFloat16},
                        {Dtype::kFloat16, Dtype::kFloat16}, {Dtype::kFloat64, Dtype::kFloat64},
                        {Dtype::kBFloat16, Dtype::kFloat32}, {Dtype::kFloat16, Dtype::kFloat32}};
  std::vector<Spec> cases;
  Rng rng(seed);
  for (int round = 0; round < rounds; ++round)
    for (i64 K : {1, 7, 16, 20, 24, 32, 60, 64, 100, 128, 130})
      for (i64 V : {1, 7, 16, 20, 24, 32, 60, 64, 100, 128, 130})
        for (const Pair& pair : pairs) {
          Spec s;
          s.K = K;
          s.V = V;
          s.dtype = pair.dtype;
          s.gate_dtype = pair.gate;
          s.T = rng.pick<i64>({1, 7, 17, 65, 150});
          s.B = rng.pick<i64>({1, 1, 2});
          s.H = rng.pick<i64>({1, 2, 3});
          while (s.B * s.H * s.T * s.K * s.V > 1500000 && s.B * s.H > 1) (s.H > 1 ? s.H : s.B) -= 1;
          s.log_gate = rng.chance(0.3);
          s.has_initial = rng.chance(0.5);
          s.wants_final = rng.chance(0.5);
          s.has_dfinal = rng.chance(0.5);
          s.wants_dinitial = rng.chance(0.5);
          if (backward && rng.chance(0.25)) {
            s.wants_dq = rng.chance(0.5);
            s.wants_dk = rng.chance(0.5);
            s.wants_dv = rng.chance(0.5);
            s.wants_dgate = rng.chance(0.5);
            if (!(s.wants_dq || s.wants_dk || s.wants_dv || s.wants_dgate)) s.wants_dinitial = true;
            if (s.has_dfinal) s.has_dy = rng.chance(0.5);
          }
          s.strided = rng.chance(0.45);
          s.strided_outputs = !backward && rng.chance(0.2);
          s.scale = rng.chance(0.4) ? 1.0 : rng.chance(0.9) ? 1 / std::sqrt(static_cast<double>(K)) : -0.5;
          s.gates = static_cast<int>(rng.below(5));
          s.processors = rng.pick<int>({132, 132, 1, 4, 20});
          s.seed = rng.next() >> 34;
          if (s.H > 1 && Rng(s.seed).chance(0.5)) s.group = s.H;
          cases.push_back(s);
        }
  // A few beyond the grid: K of 0 (forward), K of three slices, long T, many heads.
  const i64 extra[][5] = {{1, 9, 2, 0, 20}, {1, 40, 1, 300, 12}, {1, 700, 1, 24, 24}, {3, 5, 40, 24, 8}, {2, 33, 3, 24, 24},
                          {1, 257, 2, 64, 64}, {1, 33, 1, 257, 36}, {5, 1, 1, 1, 1}, {1, 1500, 1, 8, 4},
                          // Forward only: all sizes of the tensor-core kernel, long enough for several segments.
                          {1, 600, 1, 32, 32}, {1, 600, 1, 64, 40}, {1, 400, 1, 128, 136}, {1, 300, 1, 160, 24}, {1, 270, 1, 256, 72}};
  for (const auto& e : extra)
    for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat64})
      for (int processors : {132, 1}) {
        Spec s;
        s.B = e[0];
        s.T = e[1];
        s.H = e[2];
        s.K = e[3];
        s.V = e[4];
        if (backward && (s.K == 0 || &e >= &extra[9])) continue;
        s.dtype = s.gate_dtype = dtype;
        s.has_initial = s.wants_final = s.has_dfinal = s.wants_dinitial = true;
        s.group = s.H % 4 == 0 ? 4 : 1;
        s.gates = e[1] > 500 ? 1 : 0;
        s.processors = processors;
        s.seed = rng.next() >> 34;
        cases.push_back(s);
      }
  return cases;
}

// Of the tensor cores' kernel: every tile, pair of types, end of a chunk; with few processors small problems reach it.
std::vector<Spec> tensor_cases(bool backward, uint64_t seed) {
  struct Size { i64 B, T, H, K, V; int processors, segments; };
  const Dtype half = Dtype::kFloat16, bfloat = Dtype::kBFloat16, single = Dtype::kFloat32;
  const Size halves[] = {
      {1, 64, 1, 32, 32, 1, 1}, {1, 65, 1, 24, 40, 1, 1}, {2, 100, 2, 16, 24, 1, 1}, {1, 257, 1, 8, 32, 1, 1}, {1, 300, 1, 32, 8, 1, 1},
      {1, 16, 1, 64, 64, 1, 1}, {1, 17, 1, 64, 72, 1, 1}, {1, 63, 1, 64, 64, 1, 1}, {1, 97, 1, 40, 64, 1, 1}, {2, 128, 2, 56, 24, 1, 1},
      {1, 161, 1, 64, 128, 1, 1}, {1, 31, 1, 128, 128, 1, 1}, {1, 33, 1, 128, 136, 1, 1}, {1, 96, 1, 72, 128, 1, 1}, {1, 129, 1, 128, 40, 1, 1},
      {2, 70, 1, 104, 200, 1, 1}, {1, 16, 1, 256, 128, 1, 1}, {1, 49, 1, 136, 72, 1, 1}, {1, 100, 1, 256, 136, 1, 1}, {1, 80, 2, 200, 16, 1, 1},
      {1, 520, 1, 32, 32, 3, 3}, {1, 800, 1, 24, 32, 3, 3}, {1, 545, 1, 64, 64, 3, 3}, {1, 777, 1, 40, 56, 3, 3}, {1, 513, 1, 128, 128, 3, 3},
      {1, 770, 1, 64, 128, 6, 3}, {2, 520, 1, 64, 64, 6, 3}, {1, 520, 1, 144, 24, 3, 3}, {1, 2048, 1, 8, 16, 5, 16}, {1, 2500, 1, 128, 8, 8, 8},
  };
  const Size singles[] = {
      {1, 512, 1, 32, 32, 1, 1}, {1, 513, 1, 20, 48, 1, 1}, {2, 129, 2, 32, 32, 1, 1}, {1, 128, 1, 64, 64, 1, 1}, {1, 145, 1, 64, 68, 1, 1},
      {1, 190, 1, 36, 100, 1, 1}, {1, 128, 1, 128, 128, 1, 1}, {1, 135, 1, 100, 132, 1, 1}, {1, 150, 2, 68, 36, 1, 1},
      {1, 1030, 1, 64, 64, 3, 3}, {1, 520, 1, 128, 128, 3, 3}, {1, 530, 1, 128, 192, 6, 3}, {1, 4096, 1, 20, 4, 3, 6},
  };
  std::vector<Spec> cases;
  Rng rng(seed + 1000);
  const auto add = [&](const Size& z, Dtype dtype, Dtype gate, bool plain) {
    if (backward && std::max(z.K, z.V) > (dtype == single ? 128 : 256)) return;
    Spec s;
    if (backward) s.kernels = gated_delta::Kernels::kTensorCores;
    s.B = z.B;
    s.T = z.T;
    s.H = z.H;
    s.K = z.K;
    s.V = z.V;
    s.processors = z.processors;
    s.segments = z.segments;
    s.dtype = dtype;
    s.gate_dtype = gate;
    s.has_initial = plain || rng.chance(0.5);
    s.wants_final = plain || rng.chance(0.5);
    s.has_dfinal = backward && (plain || rng.chance(0.5));
    s.wants_dinitial = backward && (plain || rng.chance(0.5));
    s.strided = !plain && rng.chance(0.7);
    s.strided_outputs = !plain && rng.chance(0.3);
    s.log_gate = !plain && rng.chance(0.3);
    s.scale = plain ? 1.0 : rng.chance(0.7) ? 1 / std::sqrt(static_cast<double>(s.K)) : -0.5;
    s.gates = plain ? 1 : static_cast<int>(rng.below(5));
    s.seed = rng.next() >> 34;
    if (!plain) s.group = s.H;
    cases.push_back(s);
  };
  for (const Size& z : halves)
    for (bool plain : {true, false}) {
      add(z, bfloat, bfloat, plain);
      add(z, half, half, plain);
      if (!plain) add(z, rng.chance(0.5) ? half : bfloat, single, plain);
    }
  for (const Size& z : singles)
    for (bool plain : {true, false}) add(z, single, single, plain);
  return cases;
}

// Sequences packed along time: none, one or many steps long, steps that are nobody's, with and without states.
std::vector<Spec> packed_cases(bool backward, uint64_t seed) {
  const std::vector<std::vector<i64>> lists = {
      {1}, {0, 0, 5, 0}, {17, 1, 1, 30, 2}, {64, 64}, {3, 130, 0, 0, 65, 1, 20}, {200, 300}, {600, 3, 0, 280}, {31, 33, 256, 1, 255, 257},
      {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}, {60, 100, 5, 70, 90, 0, 33, 110, 64, 1, 50, 44}, {512, 0, 256}, {1500}};
  struct Size { i64 H, K, V, group; };
  const Size sizes[] = {{2, 16, 24, 2}, {1, 64, 64, 1}, {1, 7, 5, 1}, {1, 128, 40, 1}, {2, 32, 32, 1}, {1, 130, 20, 1}};
  std::vector<Spec> cases;
  Rng rng(seed + 2000);
  for (const auto& list : lists)
    for (const Size& z : sizes)
      for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat64})
        for (bool states : {false, true}) {
          Spec s;
          s.lengths = list;
          s.T = rng.chance(0.3) ? 1 + rng.below(100) : 0;
          for (i64 length : list) s.T += length;
          if (s.T > 700 && z.K * z.V > 3000 && rng.chance(0.5)) continue;
          s.H = z.H;
          s.K = z.K;
          s.V = z.V;
          s.group = z.group;
          s.dtype = s.gate_dtype = dtype;
          s.long_offsets = rng.chance(0.5);
          if (states) {
            s.has_initial = rng.chance(0.7);
            s.wants_final = s.has_dfinal = !s.has_initial || rng.chance(0.5);
            s.wants_dinitial = s.has_initial && rng.chance(0.7);
          }
          s.strided = rng.chance(0.3);
          s.log_gate = rng.chance(0.25);
          s.gates = static_cast<int>(rng.below(5));
          if (s.gates == 1) s.strided = false;  // products of equal gates round the same way every time
          s.processors = rng.pick<int>({132, 132, 1, 6});
          s.kernels = rng.chance(0.6) ? gated_delta::Kernels::kTensorCores : gated_delta::Kernels::kSimt;
          if (backward && s.kernels == gated_delta::Kernels::kTensorCores) s.strided = false;  // they want copies
          s.seed = rng.next() >> 34;
          cases.push_back(s);
          // Sequences that overlap are written twice, which the race check would report.
          s.wrong_offsets = !emu::race_build && rng.chance(0.2);
          if (s.wrong_offsets) cases.push_back(s);
        }
  return cases;
}

// The decode step: every type of state, pools, padded slots, indices beyond the pool, any strides.
int steps(uint64_t seed, int rounds, const std::string& dtype) {
  struct Types { Dtype dtype, gate, state; };
  const Dtype half = Dtype::kFloat16, bfloat = Dtype::kBFloat16, single = Dtype::kFloat32, dbl = Dtype::kFloat64;
  const Types types[] = {{single, single, single}, {bfloat, bfloat, single}, {bfloat, single, bfloat}, {half, half, half},
                         {half, single, single}, {dbl, dbl, dbl}};
  int failed = 0, ran = 0;
  Rng rng(seed);
  for (int round = 0; round < 12 * rounds; ++round)
    for (const Types& t : types) {
      emu::untrack_all();
      const i64 group = rng.pick<i64>({1, 1, 2, 3});
      const i64 B = 1 + rng.below(4), H = group * (1 + rng.below(2));
      const i64 K = rng.pick<i64>({1, 7, 16, 64, 100, 128, 130, 300}), V = rng.pick<i64>({1, 7, 16, 24, 64, 100, 128, 136});
      const bool pooled = rng.chance(0.6), is_long = rng.chance(0.5), log_gate = rng.chance(0.3), strided = rng.chance(0.5);
      const i64 P = pooled ? 1 + rng.below(7) : B;
      if (!dtype.empty() && dtype != name_of(t.dtype)) continue;
      const auto layout = [&](bool written) {
        Layout l;
        if (!strided) return l;
        const i64 kind = rng.below(written ? 4 : 5);
        if (kind == 0) l.pad = rng.pick<i64>({8, 16, 3});
        if (kind == 1) l.lead = rng.pick<i64>({1, 8});
        if (kind == 2) l.step = 2;
        if (kind == 3) std::swap(l.order[2], l.order[3]);
        if (kind == 4) l.expand[rng.below(4)] = true;
        return l;
      };
      Operand q, k, v, gate, state, y;
      q.make("q", t.dtype, {B, 1, H / group, K}, layout(false));
      k.make("k", t.dtype, {B, 1, H / group, K}, layout(false));
      v.make("v", t.dtype, {B, 1, H, V}, layout(false));
      gate.make("gate", t.gate, {B, 1, H, V}, layout(false));
      state.make("state", t.state, {P, H, K, V}, layout(true));
      y.make("y", t.dtype, {B, 1, H, V});
      for (Operand* x : {&q, &k, &v, &state}) x->fill([&] { return rng.normal(); });
      gate.fill([&] { return log_gate ? -rng.uniform() : rng.uniform(); });
      for (Operand* x : {&q, &k, &v, &gate}) x->remember();
      // Each row of the pool at most once; some padded, some beyond the pool.
      std::vector<i64> rows(P), indices(B);
      for (i64 n = 0; n < P; ++n) rows[n] = n;
      for (i64 n = 0; n < B; ++n) {
        indices[n] = n;
        if (!pooled) continue;
        indices[n] = rng.chance(0.2) ? -1 - rng.below(3) : rng.chance(0.15) ? P + rng.below(1000000) : -7;
        if (indices[n] != -7 || rows.empty()) continue;
        const i64 pick = rng.below(rows.size());
        indices[n] = rows[pick];
        rows.erase(rows.begin() + pick);
      }
      std::vector<int32_t> short_indices(indices.begin(), indices.end());
      gated_delta::StepParams p;
      p.q = q.view();
      p.k = k.view();
      p.v = v.view();
      p.gate = gate.view();
      p.state = state.view();
      p.y = y.view();
      p.B = B;
      p.H = H;
      p.K = K;
      p.V = V;
      p.group = group;
      p.pool = P;
      p.dtype = t.dtype;
      p.gate_dtype = t.gate;
      p.state_dtype = t.state;
      p.log_gate = log_gate;
      p.scale = rng.chance(0.5) ? 1.0 : -0.25;
      if (pooled) {
        p.indices = is_long ? static_cast<const void*>(indices.data()) : short_indices.data();
        p.index_stride = 1;
        p.long_indices = is_long;
        emu::track(p.indices, B * (is_long ? 8 : 4), "indices");
      }
      char name[200];
      snprintf(name, sizeof name, "step B=%" PRId64 " H=%" PRId64 " group %" PRId64 " K=%" PRId64 " V=%" PRId64 " %s state %s%s%s", B, H,
               group, K, V, name_of(t.dtype), name_of(t.state), pooled ? " pool" : "", log_gate ? " log" : "");
      current = name;
      emu::processors = rng.pick<int>({132, 1, 4});
      emu::order = kSchedules[ran % 5].order;
      emu::seed = kSchedules[ran % 5].seed + ran;
      emu::errors.clear();
      const std::vector<double> before = state.dense();
      const cudaError_t error = gated_delta::launch_step(p, nullptr);
      std::string text;
      if (!emu::errors.empty()) text = emu::errors[0];
      if (error != cudaSuccess) text = "CUDA error " + std::to_string(error);
      std::vector<double> after = before, size = before, out, out_size;
      for (double& each : size) each = std::fabs(each);
      for (i64 b = 0; b < B; ++b)
        for (i64 h = 0; h < H; ++h)
          for (i64 j = 0; j < V; ++j) {
            const i64 row = indices[b];
            double sum = 0, all = 0;
            double g = gate.get(b, 0, h, j);
            if (log_gate) g = std::exp(g);
            for (i64 i = 0; row >= 0 && row < P && i < K; ++i) {
              const i64 at = ((row * H + h) * K + i) * V + j;
              const double kv = k.get(b, 0, h / group, i) * v.get(b, 0, h, j);
              after[at] = g * before[at] + kv;
              size[at] = std::fabs(g * before[at]) + std::fabs(kv);
              sum += q.get(b, 0, h / group, i) * after[at];
              all += std::fabs(q.get(b, 0, h / group, i)) * size[at];
            }
            out.push_back(row >= P ? NAN : p.scale * sum);
            out_size.push_back(std::fabs(p.scale) * all);
          }
      // An index beyond the pool: NaN, which no bound holds.
      i64 n = 0;
      y.each([&](i64 b, i64, i64 h, i64 j) {
        if (std::isnan(out[n])) {
          if (!std::isnan(y.get(b, 0, h, j))) text = "an index beyond the pool gave a number";
          store(y.at(b, 0, h, j), t.dtype, 0);
          out[n] = 0;
        }
        ++n;
      });
      if (text.empty()) text = compare(y, out, out_size, 1, accum_of(t.dtype), 4, 0);
      if (text.empty()) text = compare(state, after, size, 1, accum_of(t.dtype), 4, 0);
      for (Operand* x : {&q, &k, &v, &gate}) if (!x->unchanged()) text = "input " + x->name + " was modified";
      ++ran;
      if (!text.empty()) {
        ++failed;
        printf("FAIL %s: %s\n", name, text.c_str());
      }
    }
  printf("step: %d of %d cases failed\n", failed, ran);
  return failed != 0;
}

// The float64 gradient formulas against central differences of the float64 forward loop.
int selftest() {
  int bad = 0;
  for (bool log_gate : {false, true}) {
    Spec s;
    s.B = 2; s.T = 5; s.H = 2; s.K = 3; s.V = 4;
    s.dtype = s.gate_dtype = Dtype::kFloat64;
    s.has_initial = s.has_dfinal = s.wants_dinitial = true;
    s.log_gate = log_gate;
    s.scale = 0.7;
    s.gates = log_gate ? 0 : 2;
    s.seed = 5;
    Problem p(s, true);
    Dense d(p, false);
    d.backward(log_gate);
    std::vector<double> raw = p.gate.dense();
    const auto loss = [&] {
      d.forward();
      double sum = 0;
      for (size_t i = 0; i < d.y.size(); ++i) sum += d.y[i] * d.dy[i];
      for (size_t i = 0; i < d.final.size(); ++i) sum += d.final[i] * d.dfinal[i];
      return sum;
    };
    const auto test = [&](const char* name, std::vector<double>& x, const std::vector<double>& grad, bool logs) {
      double most = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const double was = x[i], h = 1e-5;
        x[i] = logs ? was * std::exp(h) : was + h;
        const double up = loss();
        x[i] = logs ? was * std::exp(-h) : was - h;
        const double down = loss();
        x[i] = was;
        most = std::max(most, std::fabs((up - down) / (2 * h) - grad[i]));
      }
      printf("selftest%s: %s differs from central differences by at most %.1e\n", log_gate ? " (log gate)" : "", name, most);
      if (!(most < 1e-6)) ++bad;
    };
    test("dq", d.q, d.dq, false);
    test("dk", d.k, d.dk, false);
    test("dv", d.v, d.dv, false);
    test("dgate", d.gate, d.dgate, log_gate);
    test("dinitial", d.initial, d.dinitial, false);
  }
  printf("selftest: %s\n", bad ? "FAIL" : "ok");
  return bad != 0;
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string what = argc > 1 ? argv[1] : "forward";
  bool quick = false, tensor = false, packed = false, verbose = false, all_orders = false, times = false;
  int shard = 0, shards = 1, rounds = -1, limit = 10;
  i64 only = -1;
  uint64_t seed = 1;
  std::string dtype;
  i64 T = -1, K = -1, V = -1;
  for (int i = 2; i < argc; ++i) {
    const std::string a = argv[i];
    const auto value = [&] {
      if (i + 1 >= argc) exit(2);
      return argv[++i];
    };
    if (a == "--quick") quick = true;
    else if (a == "--tensor") tensor = true;
    else if (a == "--packed") packed = true;
    else if (a == "--verbose") verbose = true;
    else if (a == "--times") times = true;
    else if (a == "--all-orders") all_orders = true;
    else if (a == "--shard") sscanf(value(), "%d/%d", &shard, &shards);
    else if (a == "--rounds") rounds = atoi(value());
    else if (a == "--limit") limit = atoi(value());
    else if (a == "--case") only = atoll(value());
    else if (a == "--seed") seed = strtoull(value(), nullptr, 10);
    else if (a == "--bars") bar_factor = atof(value());
    else if (a == "--dtype") dtype = value();
    else if (a == "--T") T = atoll(value());
    else if (a == "--K") K = atoll(value());
    else if (a == "--V") V = atoll(value());
    else {
      fprintf(stderr, "unknown option %s\n", a.c_str());
      return 2;
    }
  }
  if (what == "selftest") return shard == 0 ? selftest() : 0;
  if (what == "step") return shard == 0 ? steps(seed, rounds < 0 ? 1 : rounds, dtype) : 0;
  const bool backward = what == "backward";
#ifndef EMU_BACKWARD
  if (backward) {
    fprintf(stderr, "the source has no launch_backward\n");
    return 2;
  }
#endif
  if (rounds < 0) rounds = backward ? 1 : 2;
  std::vector<Spec> cases = all_cases(backward, seed, rounds);
#ifdef EMU_FORWARD_SCRATCH
  const std::vector<Spec> more = tensor_cases(backward, seed);
  cases.insert(cases.end(), more.begin(), more.end());
#endif
  const std::vector<Spec> more_packed = packed_cases(backward, seed);
  cases.insert(cases.end(), more_packed.begin(), more_packed.end());
  int ran = 0, failed = 0;
  i64 mine = 0;
  const auto start = std::chrono::steady_clock::now();
  std::map<std::string, int> kernels;
  for (i64 n = 0; n < static_cast<i64>(cases.size()); ++n) {
    const Spec& s = cases[n];
    if (only >= 0 && n != only) continue;
    if (!dtype.empty() && dtype != name_of(s.dtype)) continue;
    if (tensor && s.segments == 0) continue;
    if (packed && s.lengths.empty()) continue;
    if ((T >= 0 && s.T != T) || (K >= 0 && s.K != K) || (V >= 0 && s.V != V)) continue;
    if (only < 0 && quick && Rng(n).below(dtype.empty() && s.segments == 0 ? 8 : 4) != 0) continue;
    if (only < 0 && mine++ % shards != shard) continue;
    if (only >= 0 && shard != 0) continue;
    // One schedule each, in turn; every fourth case all of them.
    std::vector<int> schedules = {static_cast<int>(n % 5)};
    if (all_orders || only >= 0 || ran % 4 == 0) schedules = {0, 1, 2, 3, 4};
    if (emu::race_build && !all_orders) schedules = {static_cast<int>(n % 5)};
    std::string detail;
    emu::trace = verbose;
    emu::launched.clear();
    const auto from = std::chrono::steady_clock::now();
    const std::string problem = run_case(s, backward, schedules, &detail);
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
    ++ran;
    if (times) printf("%.3f s, %zu schedules: case %" PRId64 ": %s\n", took, schedules.size(), n, s.describe().c_str());
    for (const std::string& line : emu::launched) {
      // "name Traits<...>" out of the launching function's signature.
      const size_t with = line.find("[with");
      const std::string name = line.substr(line.find(" shared ") + 8, with - line.find(" shared ") - 8);
      size_t from_traits = line.find("Traits<", with), depth = 0, until = from_traits;
      if (from_traits == std::string::npos) {
        ++kernels[name.substr(name.find(' ') + 1)];
        continue;
      }
      while (from_traits > 0 && isalnum(line[from_traits - 1])) --from_traits;
      for (until = line.find('<', from_traits); until < line.size(); ++until) {
        depth += line[until] == '<';
        depth -= line[until] == '>';
        if (depth == 0) break;
      }
      ++kernels[name.substr(name.find(' ') + 1) + " " + line.substr(from_traits, until + 1 - from_traits)];
    }
    if (!problem.empty()) {
      if (++failed <= limit)
        printf("FAIL case %" PRId64 ": %s\n     %s\n    %s\n", n, s.describe().c_str(), problem.c_str(), detail.c_str());
      if (failed >= 200) break;
    } else if (only >= 0) {
      printf("ok case %" PRId64 ": %s\n    %s\n", n, s.describe().c_str(), detail.c_str());
    }
  }
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const auto& [name, n] : kernels) printf("  %5d launches of %s\n", n, name.c_str());
  if (verbose) for (const auto& [name, w] : worst) printf("  largest %s: %.3g\n", name.c_str(), w);
  if (emu::counts.products > 0) printf("  %" PRIu64 " products of tensor cores\n", emu::counts.products);
  printf("%s: %d of %d cases failed (shard %d/%d, %.1f s; %" PRIu64 " launches, %" PRIu64 " blocks, %" PRIu64 " threads, %" PRIu64
         " switches, %" PRIu64 " collectives, %" PRIu64 " barriers)\n",
         what.c_str(), failed, ran, shard, shards, took, emu::counts.launches, emu::counts.blocks, emu::counts.threads,
         emu::counts.switches, emu::counts.collectives, emu::counts.barriers);
  return failed != 0 || ran == 0;
}
