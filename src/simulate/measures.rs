//! Results of a simulated step: makespan, idle time and its causes, memory, and slack.
//!
//! Publications define the bubble ratio differently, so the module computes several ratios. `T` is the makespan and
//! `b_r` the busy time of rank `r` of `p`.

use super::{Costs, Inputs, Times};
use crate::control::Control;
use crate::error::Result;
use crate::schedule::{Action, Kind, Schedule, Synchronization};

/// Number of actions between two checks for cancellation. They take about a millisecond.
const ACTIONS_PER_CHECK: usize = 1 << 16;

/// Largest relative difference between two sums that counts as rounding. A million terms in another order differ by far
/// less, and reports show far fewer digits.
const ROUNDING: f64 = 1e-9;

/// Iterates over `items`, and yields an error when `control` is cancelled.
pub(crate) fn until_cancelled<T>(items: impl Iterator<Item = T>, control: &Control) -> impl Iterator<Item = Result<T>> {
    items.enumerate().map(|(count, item)| {
        if count.is_multiple_of(ACTIONS_PER_CHECK) {
            control.check()?;
        }
        Ok(item)
    })
}

/// The cause of idle time on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Cause {
    /// The rank waits for its first action of a step.
    Fill,
    /// The rank has ended its last action of a step. Includes gradient reduction and optimizer step.
    Drain,
    /// The input isn't computed yet, and the time is not an [`Cause::Imbalance`].
    Dependency,
    /// The input is computed but has not arrived, or a blocking send has not completed.
    Communication,
    /// The input is being computed by a rank with more total work than this one.
    Imbalance,
}

/// An interval in which a rank computes nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Idle {
    /// Rank that is idle.
    pub rank: usize,
    /// Start of the interval, in seconds.
    pub start_s: f64,
    /// End of the interval, in seconds.
    pub end_s: f64,
    /// Cause of the idle time.
    pub cause: Cause,
}

/// Results of a whole simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Measures {
    /// Makespan `T` in seconds: the end of the last action or optimizer step.
    pub makespan_s: f64,
    /// Longest time from a rank's first start to its last end, in seconds. The zero-bubble papers call it cost.
    pub max_rank_span_s: f64,
    /// Busy time `b_r` of each rank, in seconds.
    pub busy_s: Vec<f64>,
    /// Idle share of all device time, `1 - Σ b_r / (p T)`.
    pub idle_over_total: f64,
    /// Idle time relative to busy time, `p T / Σ b_r - 1`.
    pub idle_over_busy: f64,
    /// Idle share of the busiest rank, `1 - max b_r / T`. Balancing the stages alone can't remove it.
    pub idle_over_busiest: f64,
    /// Idle seconds over all ranks for each [`Cause`], in the order of its variants.
    pub idle_by_cause_s: [f64; 5],
    /// Largest number of virtual stage activations that each rank holds, if they are freed at `B` or `W`.
    pub peak_in_flight: Vec<u32>,
    /// Largest number of virtual stage activations that each rank holds, if they are freed at `B` or `I`.
    pub peak_in_flight_freed_at_input_gradient: Vec<u32>,
    /// Number of messages between ranks.
    pub messages: usize,
}

/// Memory and messages of one stage, in bytes. Activation, stash and output are for one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageBytes {
    /// Bytes of one version of the weights.
    pub weights: f64,
    /// Bytes of the accumulated gradients.
    pub gradients: f64,
    /// Bytes of the optimizer state.
    pub optimizer: f64,
    /// Activation bytes that are held from the start of `F` to the end of `B`, or of `I` where the backward is split.
    /// With recomputation, this is the stage's input alone.
    pub activation: f64,
    /// Bytes that are held from the end of `I` to the end of `W`.
    pub weight_gradient_stash: f64,
    /// Bytes sent to the next stage, and back as a gradient.
    pub output: f64,
    /// Recomputed activation bytes. They are held beside `activation` from the start of `B` or `I` to the end of `B`,
    /// or of `I` where the backward is split.
    pub recomputed: f64,
}

/// Returns all results that need no bytes.
///
/// # Errors
/// [`Error::Cancelled`](crate::error::Error::Cancelled) if `control` is cancelled.
pub fn measure(schedule: &Schedule, costs: &Costs, times: &Times, control: &Control) -> Result<Measures> {
    let makespan_s = times.step_s;
    let busy_s = busy_s(schedule, times);
    let total_busy_s: f64 = busy_s.iter().sum();
    let total_s = makespan_s * busy_s.len() as f64;
    let ratio = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let (idle_s, min_idle_s) =
        (left_of(total_s, total_busy_s), left_of(makespan_s, busy_s.iter().copied().fold(0.0, f64::max)));
    let mut idle_by_cause_s = [0.0; 5];
    for stretch in idle(schedule, costs, times, control)? {
        idle_by_cause_s[stretch.cause as usize] += stretch.end_s - stretch.start_s;
    }
    let inputs = Inputs::of(schedule);
    let halves = schedule.action_lists.iter().flatten().flat_map(|action| action.halves());
    let mut sent = 0;
    for half in until_cancelled(halves, control) {
        sent += usize::from(super::communication::Message::sent_by(half?, schedule, inputs).is_some());
    }
    Ok(Measures {
        makespan_s,
        max_rank_span_s: times
            .offsets
            .windows(2)
            // A rank without actions has no span.
            .filter(|range| range[0] < range[1])
            .map(|range| times.end_s[range[1] - 1] - times.start_s[range[0]])
            .fold(0.0, f64::max),
        idle_over_total: ratio(idle_s, total_s),
        idle_over_busy: ratio(idle_s, total_busy_s),
        idle_over_busiest: ratio(min_idle_s, makespan_s),
        busy_s,
        idle_by_cause_s,
        peak_in_flight: schedule.peak_in_flight(),
        peak_in_flight_freed_at_input_gradient: peak_freed_at_input_gradient(schedule),
        messages: sent * times.iterations as usize,
    })
}

/// Returns `whole` minus `part`, or 0 where they differ by rounding alone, which could make the difference negative.
fn left_of(whole: f64, part: f64) -> f64 {
    let left = whole - part;
    if left.abs() <= ROUNDING * whole { 0.0 } else { left }
}

fn busy_s(schedule: &Schedule, times: &Times) -> Vec<f64> {
    let busy = |rank: usize| {
        let range = times.offsets[rank]..times.offsets[rank + 1];
        times.start_s[range.clone()].iter().zip(&times.end_s[range]).map(|(start_s, end_s)| end_s - start_s).sum()
    };
    (0..schedule.action_lists.len()).map(busy).collect()
}

fn peak_freed_at_input_gradient(schedule: &Schedule) -> Vec<u32> {
    // Without split backwards, both definitions of the peak agree.
    let has_split = schedule.action_lists.iter().flatten().any(|action| action.kind == Kind::InputGradient);
    if !has_split {
        return schedule.peak_in_flight();
    }
    let peak = |order: &Vec<Action>| {
        let (mut held, mut peak) = (0_u32, 0_u32);
        for action in order {
            if matches!(action.kind, Kind::Forward | Kind::Overlapped) {
                held += 1;
                peak = peak.max(held);
            }
            if matches!(action.kind, Kind::Backward | Kind::InputGradient | Kind::Overlapped) {
                held = held.saturating_sub(1);
            }
        }
        peak
    };
    schedule.action_lists.iter().map(peak).collect()
}

/// Returns every idle interval by rank, in order of time. Together with the actions, the intervals fill the makespan.
///
/// # Errors
/// [`Error::Cancelled`](crate::error::Error::Cancelled) if `control` is cancelled.
pub fn idle(schedule: &Schedule, costs: &Costs, times: &Times, control: &Control) -> Result<Vec<Idle>> {
    let inputs = Inputs::of(schedule);
    let chain = schedule.stages_per_pipeline as usize;
    let busy_s = busy_s(schedule, times);
    let produced = produced(schedule, times, control)?;
    let mut stretches = Vec::new();
    for (rank, order) in schedule.action_lists.iter().enumerate() {
        let mut push = |start_s: f64, end_s: f64, cause: Cause| {
            // Sums of the same times in another order differ in the last digits. Drop intervals that are only rounding.
            if end_s - start_s > 1e-12 * times.step_s {
                stretches.push(Idle { rank, start_s, end_s, cause });
            }
        };
        let mut free_s = 0.0;
        for place in until_cancelled(times.offsets[rank]..times.offsets[rank + 1], control) {
            let place = place?;
            let count = place - times.offsets[rank];
            let (iteration, action) = (count / order.len(), order[count % order.len()]);
            let start_s = times.start_s[place];
            if count.is_multiple_of(order.len()) {
                // Between two steps, a rank first waits for its own optimizer steps (drain), then for its first input
                // (fill).
                let over_s = if iteration == 0 { 0.0 } else { released_s(schedule, costs, times, rank, iteration - 1) };
                let over_s = over_s.clamp(free_s, start_s);
                push(free_s, over_s, Cause::Drain);
                push(over_s, start_s, Cause::Fill);
            } else if start_s > free_s {
                let base = iteration * inputs.count();
                // Only the input that arrives last explains the wait.
                let latest = inputs
                    .of_action(action)
                    .max_by(|&a, &b| times.arrival_s[base + a].total_cmp(&times.arrival_s[base + b]));
                let (begun_s, computed_s) = latest.map_or((free_s, free_s), |input| produced[base + input]);
                let (begun_s, computed_s) = (begun_s.clamp(free_s, start_s), computed_s.clamp(free_s, start_s));
                let producer = latest.map_or(rank, |input| {
                    let (is_gradient, stage, _) = inputs.describe(input);
                    let from = match is_gradient {
                        true if (stage + 1).is_multiple_of(chain) => stage,
                        true => stage + 1,
                        false if stage.is_multiple_of(chain) => stage,
                        false => stage - 1,
                    };
                    schedule.rank_of_stage[from] as usize
                });
                // If the sender has more work in all, moving layers away from it would shorten this wait. Otherwise the
                // wait follows from the schedule. The tolerance ignores rounding.
                if busy_s[producer] > busy_s[rank] * (1.0 + 1e-9) {
                    push(free_s, begun_s, Cause::Dependency);
                    push(begun_s, computed_s, Cause::Imbalance);
                } else {
                    push(free_s, computed_s, Cause::Dependency);
                }
                let there_s = match (schedule.synchronization, latest) {
                    (Synchronization::LockStep, Some(input)) => {
                        times.arrival_s[base + input].clamp(computed_s, start_s)
                    }
                    _ => start_s,
                };
                push(computed_s, there_s, Cause::Communication);
                // In lock-step, a rank with its input waits for the slowest rank to end the step.
                push(there_s, start_s, Cause::Imbalance);
            }
            free_s = times.end_s[place];
        }
        push(free_s, times.step_s, Cause::Drain);
    }
    Ok(stretches)
}

/// Returns when the optimizer steps of all stages of a rank end in an iteration, in seconds.
fn released_s(schedule: &Schedule, costs: &Costs, times: &Times, rank: usize, iteration: usize) -> f64 {
    let stages = schedule.rank_of_stage.len();
    (0..stages)
        .filter(|&stage| schedule.rank_of_stage[stage] as usize == rank)
        .map(|stage| {
            let last_s = times.synchronized_from_s(schedule, iteration, stage);
            if last_s >= 0.0 { last_s + costs.gradient_sync_s[stage] + costs.optimizer_s[stage] } else { 0.0 }
        })
        .fold(0.0, f64::max)
}

/// Returns start and end of the action that computes each input, by iteration and [`Inputs`]. Inputs from outside the
/// pipeline have 0.
fn produced(schedule: &Schedule, times: &Times, control: &Control) -> Result<Vec<(f64, f64)>> {
    let inputs = Inputs::of(schedule);
    let mut produced = vec![(0.0, 0.0); times.arrival_s.len()];
    for placed in until_cancelled(placed(schedule, times), control) {
        let placed = placed?;
        for input in placed.action.halves().filter_map(|half| inputs.made_ready_by(half)) {
            produced[placed.iteration * inputs.count() + input] =
                (times.start_s[placed.place], times.end_s[placed.place]);
        }
    }
    Ok(produced)
}

/// An action of one iteration, with its index in [`Times`].
#[derive(Debug, Clone, Copy)]
struct Placed {
    place: usize,
    rank: usize,
    iteration: usize,
    action: Action,
}

/// Iterates over all actions of all iterations, in the order of [`Times`].
fn placed<'a>(schedule: &'a Schedule, times: &'a Times) -> impl Iterator<Item = Placed> + 'a {
    let of_rank = move |(rank, order): (usize, &'a Vec<Action>)| {
        let iterations = 0..times.iterations as usize;
        let all = iterations.flat_map(move |iteration| order.iter().map(move |&action| (iteration, action)));
        (times.offsets[rank]..).zip(all).map(move |(place, (iteration, action))| Placed {
            place,
            rank,
            iteration,
            action,
        })
    };
    schedule.action_lists.iter().enumerate().flat_map(of_rank)
}

/// Returns how much later each action could end with the same makespan, in seconds, ordered like [`Times`]. The action
/// lists and the durations of messages stay fixed. The actions with slack 0 form the critical path.
///
/// An action's latest end is the minimum over its successors: the next action on its rank, the actions that use its
/// output, and the gradient reduction after a stage's last backward.
///
/// # Errors
/// [`Error::Cancelled`](crate::error::Error::Cancelled) if `control` is cancelled.
pub fn slack_s(schedule: &Schedule, costs: &Costs, times: &Times, control: &Control) -> Result<Vec<f64>> {
    const NONE: usize = usize::MAX;
    if schedule.synchronization == Synchronization::LockStep {
        return super::lock_step::slack_s(schedule, times, control);
    }
    let inputs = Inputs::of(schedule);
    let all: Vec<Placed> = until_cancelled(placed(schedule, times), control).collect::<Result<_>>()?;
    let taken =
        |placed: Placed| inputs.of_action(placed.action).map(move |input| placed.iteration * inputs.count() + input);
    let mut producer = vec![NONE; times.arrival_s.len()];
    for placed in until_cancelled(all.iter(), control) {
        let placed = placed?;
        for input in placed.action.halves().filter_map(|half| inputs.made_ready_by(half)) {
            producer[placed.iteration * inputs.count() + input] = placed.place;
        }
    }
    // Process actions in reverse topological order (Kahn's algorithm): an action is ready when all its successors are
    // done.
    let mut successors = vec![0_u8; all.len()];
    for placed in until_cancelled(all.iter(), control) {
        let &placed = placed?;
        successors[placed.place] += u8::from(placed.place + 1 < times.offsets[placed.rank + 1]);
        for input in taken(placed).filter(|&input| producer[input] != NONE) {
            successors[producer[input]] += 1;
        }
    }
    let mut latest_s = vec![times.step_s; all.len()];
    limit_last_backwards(schedule, costs, times, &mut latest_s, control)?;

    let mut ready: Vec<usize> = (0..all.len()).filter(|&place| successors[place] == 0).collect();
    for event in until_cancelled(0.., control) {
        let _: usize = event?;
        let Some(place) = ready.pop() else { break };
        let latest_start_s = latest_s[place] - (times.end_s[place] - times.start_s[place]);
        let is_first = place == times.offsets[all[place].rank];
        let before = (!is_first).then(|| (place - 1, times.end_s[place - 1]));
        let inputs_there = taken(all[place]).filter(|&input| producer[input] != NONE);
        let taken: Vec<(usize, f64)> = inputs_there.map(|input| (producer[input], times.arrival_s[input])).collect();
        // An action that starts later than its known predecessors allow has waited for a stream or a blocking send. Add
        // this delay to the last of the predecessors, because the true cause is not recorded.
        let known_s = taken.iter().chain(&before).map(|&(_, time_s)| time_s).fold(0.0, f64::max);
        let unexplained_s = times.start_s[place] - known_s;
        for (predecessor, there_s) in taken.into_iter().chain(before) {
            let delay_s = there_s - times.end_s[predecessor] + if there_s < known_s { 0.0 } else { unexplained_s };
            latest_s[predecessor] = latest_s[predecessor].min(latest_start_s - delay_s);
            successors[predecessor] -= 1;
            if successors[predecessor] == 0 {
                ready.push(predecessor);
            }
        }
    }
    Ok(latest_s.iter().zip(&times.end_s).map(|(latest_s, end_s)| (latest_s - end_s).max(0.0)).collect())
}

/// Limits the latest end of each stage's last backward, so that gradient reduction and optimizer step of the stage and
/// its copies fit before the makespan.
fn limit_last_backwards(
    schedule: &Schedule,
    costs: &Costs,
    times: &Times,
    latest_s: &mut [f64],
    control: &Control,
) -> Result<()> {
    let chain = schedule.stages_per_pipeline as usize;
    let stages = schedule.rank_of_stage.len();
    let tail_s = |stage: usize| {
        let copies = (stage % chain..stages).step_by(chain);
        copies.map(|copy| costs.gradient_sync_s[copy] + costs.optimizer_s[copy]).fold(0.0, f64::max)
    };
    let mut last = vec![None; stages];
    for placed in until_cancelled(placed(schedule, times), control) {
        let placed = placed?;
        for half in placed.action.halves().filter(|half| half.kind != Kind::Forward) {
            last[half.stage as usize] = Some(placed.place);
        }
    }
    for (stage, place) in last.into_iter().enumerate() {
        if let Some(place) = place {
            latest_s[place] = latest_s[place].min(times.step_s - tail_s(stage));
        }
    }
    Ok(())
}

/// Returns the memory of each rank over time as a step function: times in seconds, and the bytes from each of them to
/// the next.
///
/// Each rank holds the number of weight versions that the schedule states. A schedule without backwards frees an
/// activation at the end of its forward.
///
/// # Errors
/// [`Error::Cancelled`](crate::error::Error::Cancelled) if `control` is cancelled.
pub fn memory(
    schedule: &Schedule,
    times: &Times,
    stages: &[StageBytes],
    control: &Control,
) -> Result<Vec<(Vec<f64>, Vec<f64>)>> {
    let trains = schedule.action_lists.iter().flatten().any(|action| action.kind != Kind::Forward);
    let curve = |(rank, order): (usize, &Vec<Action>)| {
        let kept = (0..stages.len()).filter(|&stage| schedule.rank_of_stage[stage] as usize == rank);
        // Only weights have several versions. Gradients and optimizer state exist once.
        let versions = f64::from(schedule.weight_versions[rank]);
        let fixed: f64 = kept
            .map(|stage| versions * stages[stage].weights + stages[stage].gradients + stages[stage].optimizer)
            .sum();
        let (mut time_s, mut bytes) = (vec![0.0], vec![fixed]);
        let mut now = fixed;
        let mut change = |at_s: f64, by: f64| {
            // Omit points without a change, so that curves of stages without activations stay short.
            if by != 0.0 {
                now += by;
                time_s.push(at_s);
                bytes.push(now);
            }
        };
        for (count, place) in until_cancelled(times.offsets[rank]..times.offsets[rank + 1], control).enumerate() {
            let (place, action) = (place?, order[count % order.len()]);
            // Allocate for both passes of a pair before freeing for either: they run at the same time.
            for half in action.halves() {
                let StageBytes { activation, recomputed, .. } = stages[half.stage as usize];
                let taken = match half.kind {
                    Kind::Forward => activation,
                    Kind::Backward | Kind::InputGradient => recomputed,
                    Kind::WeightGradient | Kind::Overlapped => 0.0, // `halves` yields no overlapped pair
                };
                change(times.start_s[place], taken);
            }
            for half in action.halves() {
                let StageBytes { activation, recomputed, weight_gradient_stash: stash, .. } =
                    stages[half.stage as usize];
                let freed = match half.kind {
                    Kind::Forward if trains => 0.0,
                    Kind::Overlapped => 0.0,
                    Kind::Forward => activation,
                    Kind::Backward => activation + recomputed,
                    Kind::InputGradient => activation + recomputed - stash,
                    Kind::WeightGradient => stash,
                };
                change(times.end_s[place], -freed);
            }
        }
        Ok((time_s, bytes))
    };
    schedule.action_lists.iter().enumerate().map(curve).collect()
}
