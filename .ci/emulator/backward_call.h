// The call of launch_backward: the one place that knows its arguments. driver.cpp includes it when the source has a
// launch_backward. `p.workspace(name, dtype, shape)` allocates exact, poisoned scratch memory.
namespace gated_delta {
int64_t backward_scratch_bytes(const Params& p);
int64_t kept_state_bytes(const Params& p);
cudaError_t launch_backward(const Params& p, const Gradients& grads, void* scratch, cudaStream_t stream);
}  // namespace gated_delta

cudaError_t call_backward(Problem& p) {
  Params a = shared_arguments(p);
  gated_delta::Gradients g;
  g.dy = p.dy.view();
  g.dfinal_state = p.dfinal.view();
  g.dq = p.dq.view();
  g.dk = p.dk.view();
  g.dv = p.dv.view();
  g.dgate = p.dgate.view();
  g.dinitial_state = p.dinitial.view();
  cudaError_t error = p.begin_packed(a, true, p.s.has_initial || p.s.has_dfinal);
  if (error != cudaSuccess) return error;
  // Every other time the states are those that the forward leaves.
  const int64_t kept = p.s.seed % 2 == 0 ? gated_delta::kept_state_bytes(a) : 0;
  if (kept > 0) {
    Params ahead = a;
    ahead.y = p.workspace("y", p.s.dtype, {p.s.B, p.s.T, p.s.H, p.s.V}).view();
    ahead.states = a.states = p.workspace("states", Dtype::kFloat32, {1, 1, 1, kept / 4}).base;
    const int64_t room = gated_delta::forward_scratch_bytes(ahead);
    if (room > 0) ahead.scratch = p.workspace("forward's scratch", Dtype::kFloat32, {1, 1, 1, room / 4}).base;
    error = gated_delta::launch_forward(ahead, nullptr);
    if (error != cudaSuccess) return error;
  }
  const int64_t bytes = gated_delta::backward_scratch_bytes(a);
  void* scratch = nullptr;
  if (bytes > 0) scratch = p.workspace("scratch", accum_of(p.s.dtype), {1, 1, 1, bytes / size_of(accum_of(p.s.dtype))}).base;
  error = gated_delta::launch_backward(a, g, scratch, nullptr);
  return error == cudaSuccess ? p.finish_packed(a, &g) : error;
}
