//! One forward, one backward (1F1B): after a warm-up of forwards, each stage alternates, so it holds few activations.
//!
//! The members of the family differ only in their warm-up. Stage `s` with in-flight limit `w_s` runs
//! `F^w_s, (B F)^(M - w_s), B^w_s`. It starts the forward of micro-batch `i` only after its backward of `i - w_s`, so
//! it holds at most `w_s` activations.
//!
//! The smallest limits that keep all stages busy are `S - s` (DAPPLE's policy PA, the usual 1F1B). Limits of
//! `2 (S - s) - 1` (policy PB, eager 1F1B) also hide the transfer time. A limit of 1 on every stage runs one
//! micro-batch at a time.

use super::{Action, Schedule, one_stage_each};

/// Returns the in-flight limit of each stage in plain 1F1B: `min(M, S - s)`, and at most `activation_limit`.
///
/// Source: PipeDream-Flush (Narayanan et al., 2021); DAPPLE (Fan et al., 2021), policy PA.
#[must_use]
pub fn one_f_one_b_in_flight(stages: u32, micro_batches: u32, activation_limit: u32) -> Vec<u32> {
    (0..stages).map(|stage| (stages - stage).min(micro_batches).min(activation_limit)).collect()
}

/// Returns the in-flight limit of each stage in eager 1F1B: `min(M, 2 (S - s) - 1)`, and at most `activation_limit`.
///
/// Source: DAPPLE (Fan et al., 2021), policy PB.
#[must_use]
pub fn eager_in_flight(stages: u32, micro_batches: u32, activation_limit: u32) -> Vec<u32> {
    (0..stages).map(|stage| (2 * (stages - stage) - 1).min(micro_batches).min(activation_limit)).collect()
}

/// Builds 1F1B with one stage per rank. Stage `s` warms up with `max_in_flights[s]` forwards, clamped to
/// `1..=micro_batches`.
///
/// Limits that never grow from a stage to the next can't deadlock. Other limits do, and [`Schedule::validate`] reports
/// the cycle.
///
/// ```
/// use hpgo::schedule::one_f_one_b;
///
/// let text: Vec<String> = one_f_one_b(&[2, 1], 3).action_lists[0].iter().map(ToString::to_string).collect();
/// assert_eq!(text.join(" "), "0F0 0F1 0B0 0F2 0B1 0B2");
/// ```
#[must_use]
pub fn one_f_one_b(max_in_flights: &[u32], micro_batches: u32) -> Schedule {
    let action_lists =
        (0..).zip(max_in_flights).map(|(stage, &max_in_flight)| order(stage, max_in_flight, micro_batches)).collect();
    let rank_of_stage = (0..).zip(max_in_flights).map(|(stage, _)| stage).collect();
    Schedule::of_one_chain("1f1b", micro_batches, rank_of_stage, action_lists)
}

fn order(stage: u32, max_in_flight: u32, micro_batches: u32) -> Vec<Action> {
    // A stage can't start without one activation, and never holds more than there are micro-batches.
    let max_in_flight = max_in_flight.max(1).min(micro_batches);
    let mut order = Vec::with_capacity(2 * micro_batches as usize);
    order.extend((0..max_in_flight).map(|i| Action::forward(stage, i)));
    for i in max_in_flight..micro_batches {
        // Run the backward first: it frees the activation whose memory the next forward takes.
        order.push(Action::backward(stage, i - max_in_flight));
        order.push(Action::forward(stage, i));
    }
    order.extend((micro_batches - max_in_flight..micro_batches).map(|i| Action::backward(stage, i)));
    order
}

/// Builds `F^w, (F‖B)^(M - w), B^w` with `w = min(M, 2 (p - r) - 1)`. Each forward of the steady state is fused with a
/// backward, so every transfer has a whole slot to complete.
pub(super) fn overlapped(ranks: u32, micro_batches: u32) -> Schedule {
    one_stage_each("1f1b_overlap", ranks, micro_batches, |stage| {
        // One forward and one backward run in each slot, so a micro-batch needs a slot per rank on the way to the last
        // rank and back. With fewer forwards in the warm-up, a pair would wait for its gradient.
        let max_in_flight = (2 * (ranks - stage) - 1).min(micro_batches);
        let warm_up = (0..max_in_flight).map(|i| Action::forward(stage, i));
        let pairs = (max_in_flight..micro_batches).map(|i| Action::overlapped((stage, i), (stage, i - max_in_flight)));
        let drain = (micro_batches - max_in_flight..micro_batches).map(|i| Action::backward(stage, i));
        warm_up.chain(pairs).chain(drain).collect()
    })
}
