//! ZB-H2: no bubble inside a rank, for about twice 1F1B's activations.

use super::{Action, Schedule, one_stage_each};

/// `F^w` with `w = 2 (p - r) - 1`, then `I F` with a `W` between them only where the rank would hold more than `2p - 1`
/// activations, then `I W`, then the remaining `W`.
pub(super) fn zb_h2(ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each("zb_h2", ranks, micro_batches, |stage| {
        let mut order = Vec::with_capacity(3 * micro_batches as usize);
        let mut forwards = (2 * (ranks - stage) - 1).min(micro_batches);
        let mut weights = 0;
        order.extend((0..forwards).map(|i| Action::forward(stage, i)));
        for i in 0..micro_batches {
            order.push(Action::input_gradient(stage, i));
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
