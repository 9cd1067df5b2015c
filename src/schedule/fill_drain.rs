//! Fill and drain: all forwards, then all backwards, and the degenerate cases with nothing to interleave.

use super::{Action, Schedule};

/// `F0..F(M-1), B0..B(M-1)` on every rank, one stage each. Source: GPipe (Huang et al., 2019).
pub(super) fn gpipe(ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each("gpipe", ranks, micro_batches, |stage| {
        let forwards = (0..micro_batches).map(move |i| Action::forward(stage, i));
        forwards.chain((0..micro_batches).map(move |i| Action::backward(stage, i))).collect()
    })
}

/// `F0..F(M-1)` on every rank: inference.
pub(super) fn forward_only(ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each("forward_only", ranks, micro_batches, |stage| {
        (0..micro_batches).map(|i| Action::forward(stage, i)).collect()
    })
}

fn one_stage_each(name: &str, ranks: u32, micro_batches: u32, order: impl Fn(u32) -> Vec<Action>) -> Schedule {
    Schedule::of_one_chain(name, micro_batches, (0..ranks).collect(), (0..ranks).map(order).collect())
}
