"""The operator in plain PyTorch: the module that gated_delta_jit replaces, and the oracle it is checked against.

For every batch b and head h a state S of shape (K, V) walks over time:

    S_t[i, j] = gate_t[j] * S_{t-1}[i, j] + k_t[i] * v_t[j]
    y_t[j]    = scale * sum_i q_t[i] * S_t[i, j]

`Model`, `get_inputs` and `get_init_inputs` follow KernelBench's convention for a reference file.
`gated_delta_reference` is the same loop with every option of `gated_delta_jit.gated_delta`; it is differentiable, runs
on any device, and is an oracle when it is given float64. `gated_delta_step_reference` is one step of it.
"""

import torch


def gated_delta_reference(
    q, k, v, gate, *, scale=1.0, initial_state=None, output_final_state=False, log_gate=False, cu_seqlens=None
):
    """Value-gated linear recurrence as a Python loop over time.

    Arguments, shapes and results are those of `gated_delta_jit.gated_delta`: q, k (B, T, H, K), v (B, T, H, V), gate
    broadcastable to (B, T, H, V), states (B, H, K, V); q and k may have H / n heads, of which head h reads h // n. The
    state and all sums are float32, or float64 when any input is; y has q's dtype. Returns (y, final_state), final_state
    being None unless asked for.
    """
    if cu_seqlens is not None:
        return _packed_reference(q, k, v, gate, scale, initial_state, output_final_state, log_gate, cu_seqlens)
    inputs = (q, k, v, gate) if initial_state is None else (q, k, v, gate, initial_state)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32
    out_dtype = q.dtype
    q, k, v, gate = (x.to(dtype) for x in (q, k, v, gate))
    if log_gate:
        gate = gate.exp()
    B, T, H, V = v.shape
    K = q.shape[-1]
    if q.shape[2] != H:
        q, k = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k))
    gate = gate.expand(B, T, H, V)
    if initial_state is None:
        state = q.new_zeros(B, H, K, V)
    else:
        state = initial_state.to(dtype)
    outputs = []
    for t in range(T):
        state = gate[:, t].unsqueeze(-2) * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-1) * state).sum(dim=-2))
    y = torch.stack(outputs, dim=1) if outputs else q.new_zeros(B, 0, H, V)
    if scale != 1.0:
        y = scale * y
    return y.to(out_dtype), state if output_final_state else None


def _packed_reference(q, k, v, gate, scale, initial_state, output_final_state, log_gate, cu_seqlens):
    """Each of N sequences packed along T by itself. Steps past the last offset give 0."""
    offsets = cu_seqlens.tolist()
    gate = gate.expand(v.shape)
    outputs = []
    states = []
    for n in range(len(offsets) - 1):
        part = (x[:, offsets[n] : offsets[n + 1]] for x in (q, k, v, gate))
        start = None if initial_state is None else initial_state[n : n + 1]
        options = {"scale": scale, "initial_state": start, "output_final_state": True, "log_gate": log_gate}
        y, state = gated_delta_reference(*part, **options)
        outputs.append(y)
        states.append(state)
    outputs.append(q.new_zeros(1, v.shape[1] - offsets[-1], *v.shape[2:]))
    return torch.cat(outputs, dim=1), torch.cat(states) if output_final_state else None


def gated_delta_step_reference(q, k, v, gate, state, *, scale=1.0, log_gate=False, state_indices=None):
    """One step of time: arguments and result are those of `gated_delta_jit.gated_delta_step`; `state` is updated."""
    rows = torch.arange(q.shape[0]) if state_indices is None else state_indices.long().cpu()
    y = q.new_zeros(v.shape)
    for b, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        step = (x[b : b + 1].unsqueeze(1) for x in (q, k, v, gate.expand(v.shape)))
        before = state[row : row + 1].to(torch.promote_types(state.dtype, torch.float32))
        options = {"scale": scale, "initial_state": before, "output_final_state": True, "log_gate": log_gate}
        y_row, after = gated_delta_reference(*step, **options)
        y[b] = y_row[0, 0]
        state[row] = after[0]
    return y


class Model(torch.nn.Module):
    """The loop as people write it: scale 1, zero state at the start, y alone."""

    def forward(self, q, k, v, gate):
        return gated_delta_reference(q, k, v, gate)[0]


B, T, H, D = 2, 128, 4, 24


def get_inputs():
    """q, k, v, gate of the seed problem: float32, (B, T, H, D) = (2, 128, 4, 24), gate = sigmoid(randn)."""
    q, k, v = (torch.randn(B, T, H, D) for _ in range(3))
    return [q, k, v, torch.sigmoid(torch.randn(B, T, H, D))]


def get_init_inputs():
    """`Model` takes no arguments."""
    return []
