//! One forward, one backward: after a warm-up of forwards each stage alternates, so that few activations are held.
//!
//! Only the warm-up differs between the members of the family. Stage `s` with window `w_s` runs
//! `F^w_s, (B F)^(M - w_s), B^w_s`: it starts the forward of micro-batch `i` only after its backward of `i - w_s`, and
//! so holds `w_s` activations at most. The smallest windows that keep all stages busy are `S - s` (DAPPLE's policy PA,
//! the usual 1F1B); `2 (S - s) - 1` (policy PB, eager 1F1B) also hides the time of the transfers. A window of 1
//! everywhere runs one micro-batch after the other.

use super::{Action, Schedule, one_stage_each};

/// Windows of plain 1F1B: `min(M, S - s)`, and never more than `cap`.
///
/// Source: PipeDream-Flush (Narayanan et al., 2021); DAPPLE (Fan et al., 2021), policy PA.
#[must_use]
pub fn one_f_one_b_in_flight(stages: u32, micro_batches: u32, cap: u32) -> Vec<u32> {
    (0..stages).map(|stage| (stages - stage).min(micro_batches).min(cap)).collect()
}

/// Windows of eager 1F1B: `min(M, 2 (S - s) - 1)`, and never more than `cap`.
///
/// Source: DAPPLE (Fan et al., 2021), policy PB.
#[must_use]
pub fn eager_in_flight(stages: u32, micro_batches: u32, cap: u32) -> Vec<u32> {
    (0..stages).map(|stage| (2 * (stages - stage) - 1).min(micro_batches).min(cap)).collect()
}

/// One stage a rank; stage `s` warms up with `max_in_flights[s]` forwards, brought into `1..=micro_batches`.
///
/// Windows that never grow from a stage to the next can't deadlock; others do, and [`Schedule::validate`] says so.
///
/// ```
/// use hpgo::schedule::one_f_one_b;
///
/// let text: Vec<String> = one_f_one_b(&[2, 1], 3).orders[0].iter().map(ToString::to_string).collect();
/// assert_eq!(text.join(" "), "0F0 0F1 0B0 0F2 0B1 0B2");
/// ```
#[must_use]
pub fn one_f_one_b(max_in_flights: &[u32], micro_batches: u32) -> Schedule {
    let orders =
        (0..).zip(max_in_flights).map(|(stage, &max_in_flight)| order(stage, max_in_flight, micro_batches)).collect();
    let rank_of_stage = (0..).zip(max_in_flights).map(|(stage, _)| stage).collect();
    Schedule::of_one_chain("1f1b", micro_batches, rank_of_stage, orders)
}

fn order(stage: u32, max_in_flight: u32, micro_batches: u32) -> Vec<Action> {
    let max_in_flight = max_in_flight.max(1).min(micro_batches);
    let mut order = Vec::with_capacity(2 * micro_batches as usize);
    order.extend((0..max_in_flight).map(|i| Action::forward(stage, i)));
    for i in max_in_flight..micro_batches {
        order.push(Action::backward(stage, i - max_in_flight));
        order.push(Action::forward(stage, i));
    }
    order.extend((micro_batches - max_in_flight..micro_batches).map(|i| Action::backward(stage, i)));
    order
}

/// `F^w, (F‖B)^(M - w), B^w` with `w = min(M, 2 (p - r) - 1)`: each forward of the steady state runs as one with a
/// backward, which leaves a whole slot for every transfer.
pub(super) fn overlapped(ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each("1f1b_overlap", ranks, micro_batches, |stage| {
        let max_in_flight = (2 * (ranks - stage) - 1).min(micro_batches);
        let warm_up = (0..max_in_flight).map(|i| Action::forward(stage, i));
        let pairs = (max_in_flight..micro_batches).map(|i| Action::overlapped((stage, i), (stage, i - max_in_flight)));
        let drain = (micro_batches - max_in_flight..micro_batches).map(|i| Action::backward(stage, i));
        warm_up.chain(pairs).chain(drain).collect()
    })
}
