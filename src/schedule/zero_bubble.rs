//! ZB-H2: no bubble inside a rank, for about twice the activations of 1F1B.

use super::{Action, Schedule, one_stage_each};

/// Builds ZB-H2. Each rank runs `F^w` with `w = 2 (p - r) - 1`, then alternates `I` and `F`. It inserts a `W` only
/// where it would otherwise hold more than `2p - 1` activations. When all forwards have run, it alternates `I` and `W`,
/// and then runs the remaining `W`.
pub(super) fn zb_h2(ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each("zb_h2", ranks, micro_batches, |stage| {
        let mut order = Vec::with_capacity(3 * micro_batches as usize);
        let mut forwards = (2 * (ranks - stage) - 1).min(micro_batches);
        let mut weights = 0;
        order.extend((0..forwards).map(|i| Action::forward(stage, i)));
        for i in 0..micro_batches {
            order.push(Action::input_gradient(stage, i));
            // Every rank may hold as much as the first one. A later rank starts with fewer forwards, so it defers more
            // weight gradients, which fill its longer drain.
            let full = forwards - weights == 2 * ranks - 1;
            if full || forwards == micro_batches {
                order.push(Action::weight_gradient(stage, weights));
                weights += 1;
            }
            if forwards < micro_batches {
                order.push(Action::forward(stage, forwards));
                forwards += 1;
            }
        }
        order.extend((weights..micro_batches).map(|i| Action::weight_gradient(stage, i)));
        order
    })
}
