//! Zero-bubble schedule under any activation limit, fitted to the durations of uneven stages.
//!
//! A rank fills the gap before its next forward or input gradient with weight gradients, and runs one earlier only to
//! stay under the activation limit. Three choices remain: how far forwards may run ahead, whether a forward or an input
//! gradient goes first, and by how much a weight gradient may overrun its gap. Every combination is tried in virtual
//! time, and the one with the smallest makespan is kept. The idea is from Qi et al. (2023), section 3.1.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::squeeze::Instant;
use super::{Action, Durations, Schedule, one_stage_each};
use crate::control::Control;
use crate::error::Result;

/// Limit on the actions of all tried combinations, so that large schedules stay fast. The most promising combinations
/// are tried first. Not tuned.
const MAX_TRIALS: usize = 20_000_000;

/// Times that differ by less count as equal, in seconds. Sums of the same durations in different order differ by
/// rounding errors.
const SAME_S: f64 = 1e-9;

/// Limit on how far forwards may run ahead of input gradients on a stage.
#[derive(Debug, Clone, Copy)]
enum Ahead {
    /// Only the activation limit counts.
    Cap,
    /// `2 (p - r) - 1`, as in ZB-H2.
    Eager,
    /// A number of quarters of `p - r`, rounded down. Four quarters are 1F1B.
    Quarters(usize),
}

/// Rule for the order of a forward and an input gradient.
#[derive(Debug, Clone, Copy)]
enum First {
    /// The one that can start earlier. On a tie, the input gradient.
    Earlier,
    /// The input gradient, if it can start before the forward would end.
    InputGradient,
    /// The one that can start earlier. On a tie, they alternate.
    Turns,
    /// The one that can start earlier. On a tie, the forward.
    Forward,
    /// The two alternate strictly.
    Alternate,
    /// The input gradient, if it can start before the middle of the forward.
    SoonInputGradient,
}

#[derive(Debug, Clone, Copy)]
struct Preference {
    ahead: Ahead,
    first: First,
    /// Fraction of a weight gradient that may extend beyond its gap.
    overrun: f64,
}

/// Returns all combinations. Those that are best most often come first.
fn preferences() -> impl Iterator<Item = Preference> {
    let firsts = [
        First::Earlier,
        First::InputGradient,
        First::Turns,
        First::Forward,
        First::Alternate,
        First::SoonInputGradient,
    ];
    let aheads =
        [Ahead::Cap, Ahead::Quarters(4), Ahead::Eager, Ahead::Quarters(6), Ahead::Quarters(7), Ahead::Quarters(8)];
    [0.0, 1.0, 0.5, 0.25].into_iter().flat_map(move |overrun| {
        aheads
            .into_iter()
            .flat_map(move |ahead| firsts.into_iter().map(move |first| Preference { ahead, first, overrun }))
    })
}

/// Builds the schedule. `durations` must have one entry for each of `ranks` stages, and `activation_limit` must be at
/// least 1.
pub(super) fn zb(
    ranks: u32,
    micro_batches: u32,
    activation_limit: u32,
    durations: &Durations,
    control: &Control,
) -> Result<Schedule> {
    // Stop as soon as a trial reaches the lower bound. The order of trials and the work limit do not depend on the
    // machine, so the result is the same everywhere.
    let bound_s = bound_s(micro_batches, durations);
    let mut best: Option<Trial> = None;
    let mut tried = 0;
    for preference in preferences() {
        let mut trial = Trial::new(ranks, micro_batches, activation_limit, durations, preference);
        trial.run(control)?;
        tried += 3 * ranks as usize * micro_batches as usize;
        if best.as_ref().is_none_or(|best| trial.cost() < best.cost()) {
            best = Some(trial);
        }
        let done = best.as_ref().is_some_and(|best| best.cost().0 <= bound_s + SAME_S);
        if done || tried >= MAX_TRIALS {
            break;
        }
    }
    let ranks_of_best = best.map(|best| best.ranks).unwrap_or_default();
    Ok(one_stage_each("zb", ranks, micro_batches, |stage| ranks_of_best[stage as usize].order.clone()))
}

/// Returns a lower bound on the makespan, in seconds: a stage waits for its first input and then has all its work to
/// do.
fn bound_s(micro_batches: u32, durations: &Durations) -> f64 {
    let mut fill_s = 0.0;
    let mut bound_s: f64 = 0.0;
    for (stage, forward_s) in durations.forward_s.iter().enumerate() {
        let work_s = forward_s + durations.input_gradient_s[stage] + durations.weight_gradient_s[stage];
        bound_s = bound_s.max(fill_s + f64::from(micro_batches) * work_s);
        fill_s += forward_s + durations.transfer_s;
    }
    bound_s
}

/// State of one rank in a trial.
#[derive(Debug, Clone, Default)]
struct Rank {
    order: Vec<Action>,
    /// End times of its forwards and of its input gradients, by micro-batch.
    forward_end_s: Vec<f64>,
    input_end_s: Vec<f64>,
    weights: usize,
    free_s: f64,
    start_s: Option<f64>,
    after_forward: bool,
}

/// The next forward or input gradient of a rank.
#[derive(Debug, Clone, Copy)]
struct Next {
    start_s: f64,
    forward: bool,
    /// Whether a weight gradient must run first, to free an activation.
    forced: bool,
}

/// One trial: a combination of preferences, run in virtual time.
struct Trial<'a> {
    durations: &'a Durations,
    micro_batches: usize,
    activation_limit: usize,
    preference: Preference,
    ranks: Vec<Rank>,
}

impl<'a> Trial<'a> {
    fn new(
        ranks: u32,
        micro_batches: u32,
        activation_limit: u32,
        durations: &'a Durations,
        preference: Preference,
    ) -> Self {
        let micro_batches = micro_batches as usize;
        let rank = || Rank {
            order: Vec::with_capacity(3 * micro_batches),
            forward_end_s: Vec::with_capacity(micro_batches),
            input_end_s: Vec::with_capacity(micro_batches),
            ..Rank::default()
        };
        let ranks = (0..ranks).map(|_| rank()).collect();
        Self { durations, micro_batches, activation_limit: activation_limit as usize, preference, ranks }
    }

    /// Returns the makespan, then the longest time between first start and last end of a rank. The second decides ties.
    fn cost(&self) -> (f64, f64) {
        let fold = |of: fn(&Rank) -> f64| self.ranks.iter().map(of).fold(0.0, f64::max);
        (fold(|rank| rank.free_s), fold(|rank| rank.free_s - rank.start_s.unwrap_or(0.0)))
    }

    /// Runs the trial to its end. Always runs the action that starts first, because only its neighbors' choices can
    /// change.
    fn run(&mut self, control: &Control) -> Result<()> {
        let mut queue = BinaryHeap::new();
        let mut choices: Vec<Option<Next>> = vec![None; self.ranks.len()];
        let mut changed = 0..self.ranks.len();
        let mut events = 0_u32;
        loop {
            events = events.wrapping_add(1);
            if events.is_multiple_of(4096) {
                control.check()?;
            }
            for at in changed.clone() {
                choices[at] = self.choose(at);
                if let Some(next) = choices[at] {
                    queue.push(Reverse((Instant(next.start_s), at)));
                }
            }
            let Some(Reverse((Instant(start_s), at))) = queue.pop() else { break };
            // A rank that has chosen again leaves its older event in the queue. Drop such an event.
            let choice = choices[at].take_if(|next| next.start_s.to_bits() == start_s.to_bits());
            changed = match choice {
                Some(next) => {
                    self.carry_out(at, next);
                    at.saturating_sub(1)..(at + 2).min(self.ranks.len())
                }
                None => 0..0,
            };
        }
        for at in 0..self.ranks.len() {
            while self.ranks[at].weights < self.micro_batches {
                self.put_weight(at);
            }
        }
        Ok(())
    }

    fn choose(&self, at: usize) -> Option<Next> {
        let rank = &self.ranks[at];
        let (forwards, inputs) = (rank.forward_end_s.len(), rank.input_end_s.len());
        let input_ready_s = match rank.forward_end_s.get(inputs) {
            Some(&forward_end_s) => match self.ranks.get(at + 1) {
                None => forward_end_s,
                Some(after) => {
                    after.input_end_s.get(inputs).map_or(f64::INFINITY, |end| end + self.durations.transfer_s)
                }
            },
            None => f64::INFINITY,
        };
        let may_run_ahead = forwards < self.micro_batches && forwards - inputs < self.ahead(at);
        // An activation is held from its forward to its weight gradient.
        let full = forwards - rank.weights >= self.activation_limit;
        let forward_ready_s = match at.checked_sub(1) {
            // A full rank without a pending weight gradient can't free an activation, so it needs an input gradient
            // first.
            _ if !may_run_ahead || (full && rank.weights == inputs) => f64::INFINITY,
            None => 0.0,
            Some(before) => self.ranks[before]
                .forward_end_s
                .get(forwards)
                .map_or(f64::INFINITY, |end| end + self.durations.transfer_s),
        };
        // A full rank must first run a weight gradient, which delays its forward.
        let room_s = if full { self.durations.weight_gradient_s[at] } else { 0.0 };
        let input_s = rank.free_s.max(input_ready_s);
        let forward_s = (rank.free_s + room_s).max(forward_ready_s);
        let length_s = self.durations.forward_s[at];
        let forward = match self.preference.first {
            First::Earlier => forward_s + SAME_S < input_s,
            First::InputGradient => forward_s + length_s <= input_s + SAME_S,
            First::Turns if (forward_s - input_s).abs() < SAME_S => !rank.after_forward,
            First::Forward => forward_s <= input_s + SAME_S,
            First::Alternate if inputs > 0 && rank.after_forward && inputs < forwards => false,
            First::Alternate if !rank.after_forward && may_run_ahead => true,
            First::Turns | First::Alternate => forward_s < input_s,
            First::SoonInputGradient => forward_s + length_s / 2.0 < input_s,
        };
        let start_s = if forward { forward_s } else { input_s };
        start_s.is_finite().then_some(Next { start_s, forward, forced: forward && full })
    }

    fn ahead(&self, at: usize) -> usize {
        let to_end = self.ranks.len() - at;
        match self.preference.ahead {
            Ahead::Cap => usize::MAX,
            Ahead::Eager => 2 * to_end - 1,
            Ahead::Quarters(quarters) => quarters * to_end / 4,
        }
    }

    fn carry_out(&mut self, at: usize, next: Next) {
        if next.forced {
            self.put_weight(at);
        }
        let weight_s = self.durations.weight_gradient_s[at];
        let latest_end_s = next.start_s + self.preference.overrun * weight_s + SAME_S;
        // Fill the gap before the chosen pass with pending weight gradients, as far as the allowed overrun permits.
        while self.ranks[at].weights < self.ranks[at].input_end_s.len()
            && self.ranks[at].free_s + SAME_S < next.start_s
            && self.ranks[at].free_s + weight_s <= latest_end_s
        {
            self.put_weight(at);
        }
        let rank = &mut self.ranks[at];
        let start_s = rank.free_s.max(next.start_s);
        rank.start_s.get_or_insert(start_s);
        rank.after_forward = next.forward;
        let stage = u32::try_from(at).expect("fewer than 2^32 ranks");
        let (ends_s, length_s, action): (_, _, fn(u32, u32) -> Action) = if next.forward {
            (&mut rank.forward_end_s, self.durations.forward_s[at], Action::forward)
        } else {
            (&mut rank.input_end_s, self.durations.input_gradient_s[at], Action::input_gradient)
        };
        rank.order.push(action(stage, u32::try_from(ends_s.len()).expect("fewer than 2^32 micro-batches")));
        rank.free_s = start_s + length_s;
        ends_s.push(rank.free_s);
    }

    fn put_weight(&mut self, at: usize) {
        let rank = &mut self.ranks[at];
        let stage = u32::try_from(at).expect("fewer than 2^32 ranks");
        let micro_batch = u32::try_from(rank.weights).expect("fewer than 2^32 micro-batches");
        rank.order.push(Action::weight_gradient(stage, micro_batch));
        rank.free_s += self.durations.weight_gradient_s[at];
        rank.weights += 1;
    }
}
