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

/// Builds the breadth-first looped schedule. Each rank runs all forwards of its first virtual stage, then of the next,
/// and so on. The backwards run in reverse order of virtual stages and of micro-batches.
pub(super) fn looped_breadth_first(ranks: u32, virtual_stages_per_rank: u32, micro_batches: u32) -> Schedule {
    let order = |rank: u32| {
        let mut order = Vec::with_capacity(2 * (virtual_stages_per_rank * micro_batches) as usize);
        for virtual_stage in 0..virtual_stages_per_rank {
            order.extend((0..micro_batches).map(|i| Action::forward(virtual_stage * ranks + rank, i)));
        }
        for virtual_stage in (0..virtual_stages_per_rank).rev() {
            order.extend((0..micro_batches).rev().map(|i| Action::backward(virtual_stage * ranks + rank, i)));
        }
        order
    };
    // Looped placement puts stage s + 1 on the next rank, so each virtual stage fills the pipeline while the previous
    // virtual stage still runs.
    let action_lists = (0..ranks).map(order).collect();
    Schedule::of_one_chain("looped_bfs", micro_batches, loop_placement(ranks, virtual_stages_per_rank), action_lists)
}
