//! Schedules that run all forward passes before all backward passes.

use super::{Action, Schedule, loop_placement, one_stage_each};

/// Builds `GPipe`: `F0..F(M-1), B0..B(M-1)` on every rank, one stage per rank.
pub(super) fn gpipe(ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each("gpipe", ranks, micro_batches, |stage| {
        let forwards = (0..micro_batches).map(|i| Action::forward(stage, i));
        forwards.chain((0..micro_batches).map(|i| Action::backward(stage, i))).collect()
    })
}

/// Builds `F0..F(M-1)` on every rank, one stage per rank. `staggered` has the same actions and differs only in its
/// synchronization.
pub(super) fn forward_only(name: &str, ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each(name, ranks, micro_batches, |stage| (0..micro_batches).map(|i| Action::forward(stage, i)).collect())
}

/// Builds the breadth-first looped schedule. Each rank runs all forwards of its first chunk, then of the next, and so
/// on. The backwards run in reverse order of chunks and of micro-batches.
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
    // Looped placement puts stage s + 1 on the next rank, so each chunk fills the pipeline while the previous chunk
    // still runs.
    let orders = (0..ranks).map(order).collect();
    Schedule::of_one_chain("looped_bfs", micro_batches, loop_placement(ranks, chunks), orders)
}
