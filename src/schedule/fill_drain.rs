//! Fill and drain: all forwards, then all backwards.

use super::{Action, Schedule, loop_placement, one_stage_each};

/// `F0..F(M-1), B0..B(M-1)` on every rank, one stage each.
pub(super) fn gpipe(ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each("gpipe", ranks, micro_batches, |stage| {
        let forwards = (0..micro_batches).map(|i| Action::forward(stage, i));
        forwards.chain((0..micro_batches).map(|i| Action::backward(stage, i))).collect()
    })
}

/// `F0..F(M-1)` on every rank, one stage each; `staggered` differs only in its pace.
pub(super) fn forward_only(name: &str, ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each(name, ranks, micro_batches, |stage| (0..micro_batches).map(|i| Action::forward(stage, i)).collect())
}

/// Each chunk of a rank upwards: all its forwards; each downwards: all its backwards, last micro-batch first.
pub(super) fn looped_breadth_first(ranks: u32, chunks: u32, micro_batches: u32) -> Schedule {
    let order = |rank: u32| {
        let mut order = Vec::with_capacity(2 * (chunks * micro_batches) as usize);
        for chunk in 0..chunks {
            order.extend((0..micro_batches).map(|i| Action::forward(chunk * ranks + rank, i)));
        }
        for chunk in (0..chunks).rev() {
            order.extend((0..micro_batches).rev().map(|i| Action::backward(chunk * ranks + rank, i)));
        }
        order
    };
    let orders = (0..ranks).map(order).collect();
    Schedule::of_one_chain("looped_bfs", micro_batches, loop_placement(ranks, chunks), orders)
}
