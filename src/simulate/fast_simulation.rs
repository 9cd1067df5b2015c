//! Simulation of fixed action lists without an event heap.
//!
//! The order of actions on a rank is fixed, and so is the order of messages on a link. So the times of each action
//! follow from its predecessors alone. A rank runs until it lacks an input and then sleeps. The rank that delivers this
//! input wakes it. Each action is visited at most twice, for any schedule.
//!
//! ```text
//! rank 0   F0 F1 · · · B0 F2 …      asleep on "gradient of micro-batch 0 at stage 0"
//! rank 1   · F0 F1 · B0 …           delivers it, wakes rank 0
//! ```

use rustc_hash::FxHashMap;

use super::{Costs, StageTimes, Times, Transfer};
use crate::error::{Error, Result};
use crate::schedule::{Kind, Schedule};

/// Model of how messages share links. A link joins two ranks in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// Every message has the link for itself.
    Free,
    /// A link transfers one message at a time, in the order in which they are sent. Latencies overlap.
    Queued,
}

/// A simulator that keeps its buffers between calls. Reuse one for many calls.
///
/// Schedules must be valid: every action once, on the rank of its stage, and weight gradients after input gradients.
/// Only a deadlock is detected here. A message between two stages of one rank takes no time.
#[derive(Debug, Default)]
pub struct Sweep {
    /// Time at which the input of each action is available, [`ABSENT`] before that: forwards by `[micro-batch][stage]`,
    /// then backwards.
    ready_s: Vec<f64>,
    lanes: Vec<Lane>,
    awake: Vec<u32>,
    /// Deliveries at the end of a forward, by stage, then deliveries at the end of a backward.
    deliveries: Vec<Delivery>,
    link_ids: FxHashMap<(u32, u32), u32>,
    link_free_s: Vec<f64>,
    last_backward_s: Vec<f64>,
}

/// Time of an input that has not been delivered. Infinite, so that the maximum of two inputs is absent if one of them
/// is.
const ABSENT: f64 = f64::INFINITY;
/// Value of `waits_for` for a rank that is awake.
const NOTHING: usize = usize::MAX;

/// Progress of a rank.
#[derive(Debug, Clone, Copy)]
struct Lane {
    next: usize,
    free_s: f64,
    /// Index into `ready_s` of the input that the rank waits for, or [`NOTHING`].
    waits_for: usize,
}

/// The input that the end of an action makes available, and the cost of its transfer.
#[derive(Debug, Clone, Copy)]
struct Delivery {
    cost: Transfer,
    /// Difference between the slot of the input and the slot of the action. Wraps around for negative differences.
    offset: usize,
    link: u32,
    /// Rank that receives the input, or [`NOBODY`] after the backward of a first stage.
    to_rank: u32,
}

// A constant instead of an `Option<u32>` keeps [`Delivery`] small: `deliver` reads one for each action.
const NOBODY: u32 = u32::MAX;

impl Sweep {
    /// Simulates one step. Returns its seconds: to the end of the last action, or of the last optimizer step if that is
    /// later.
    ///
    /// # Errors
    /// [`Error::Argument`] if `costs` doesn't match the schedule or holds a negative time, [`Error::Schedule`] if
    /// actions wait for each other.
    pub fn step_s(&mut self, schedule: &Schedule, costs: &Costs, links: Links) -> Result<f64> {
        self.start(schedule, costs)?;
        self.run(schedule, costs, links, |_, _, _, _| {})
    }

    /// Returns the end of the last backward of each stage in the last run, in seconds. Negative infinity if a stage has
    /// none.
    #[must_use]
    pub fn last_backward_s(&self) -> &[f64] {
        &self.last_backward_s
    }

    /// Simulates one step. Returns start and end of every action.
    ///
    /// # Errors
    /// The errors of [`Sweep::step_s`].
    pub fn times(&mut self, schedule: &Schedule, costs: &Costs, links: Links) -> Result<Times> {
        self.start(schedule, costs)?;
        let mut offsets = Vec::with_capacity(schedule.action_lists.len() + 1);
        offsets.push(0);
        let mut actions = 0;
        for order in &schedule.action_lists {
            actions += order.len();
            offsets.push(actions);
        }
        let (mut start_s, mut end_s) = (vec![0.0; actions], vec![0.0; actions]);
        let step_s = self.run(schedule, costs, links, |rank, position, start, end| {
            start_s[offsets[rank] + position] = start;
            end_s[offsets[rank] + position] = end;
        })?;
        Ok(Times {
            iterations: 1,
            offsets,
            start_s,
            end_s,
            arrival_s: std::mem::take(&mut self.ready_s),
            last_backward_s: self.last_backward_s.clone(),
            step_s,
        })
    }

    /// Sets every rank to time zero, and computes the delivery of every stage.
    fn start(&mut self, schedule: &Schedule, costs: &Costs) -> Result<()> {
        costs.check(schedule)?;
        let stages = schedule.rank_of_stage.len();
        let slots = stages * schedule.total_micro_batches() as usize;
        let ranks = schedule.action_lists.len();
        self.lanes.clear();
        self.lanes.resize(ranks, Lane { next: 0, free_s: 0.0, waits_for: NOTHING });
        self.last_backward_s.clear();
        self.last_backward_s.resize(stages, f64::NEG_INFINITY);
        self.ready_s.clear();
        self.ready_s.resize(2 * slots, ABSENT);

        self.deliveries.clear();
        self.link_ids.clear();
        let chain = schedule.stages_per_pipeline as usize;
        for stage in 0..stages {
            let delivery = if (stage + 1) % chain == 0 {
                // At the end of the chain, the loss makes the stage's own backward available.
                self.delivery(schedule, stage, stage, Transfer::default(), slots)
            } else {
                self.delivery(schedule, stage, stage + 1, costs.activation[stage], 1)
            };
            self.deliveries.push(delivery);
        }
        for stage in 0..stages {
            let delivery = if stage % chain == 0 {
                Delivery { cost: Transfer::default(), offset: 0, link: 0, to_rank: NOBODY }
            } else {
                self.delivery(schedule, stage, stage - 1, costs.gradient[stage - 1], slots.wrapping_sub(1))
            };
            self.deliveries.push(delivery);
        }
        self.link_free_s.clear();
        // One more entry than links, because deliveries to no rank refer to link 0 even if there are no links.
        self.link_free_s.resize(self.link_ids.len() + 1, 0.0);

        for (chain_index, ids) in schedule.micro_batches.iter().enumerate() {
            for id in ids.clone() {
                self.ready_s[id as usize * stages + chain_index * chain] = 0.0;
            }
        }
        Ok(())
    }

    fn delivery(&mut self, schedule: &Schedule, from: usize, to: usize, cost: Transfer, offset: usize) -> Delivery {
        let (from_rank, to_rank) = (schedule.rank_of_stage[from], schedule.rank_of_stage[to]);
        let next = u32::try_from(self.link_ids.len()).unwrap_or(u32::MAX);
        let link = *self.link_ids.entry((from_rank, to_rank)).or_insert(next);
        // Stages on the same rank exchange no message. Callers may pass a cost for this boundary anyway.
        let cost = if from_rank == to_rank { Transfer::default() } else { cost };
        Delivery { cost, offset, link, to_rank }
    }

    /// Runs the state that `start` prepared. Calls `record(rank, position, start_s, end_s)` for each action.
    fn run(
        &mut self,
        schedule: &Schedule,
        costs: &Costs,
        links: Links,
        mut record: impl FnMut(usize, usize, f64, f64),
    ) -> Result<f64> {
        let stages = schedule.rank_of_stage.len();
        let slots = stages * schedule.total_micro_batches() as usize;
        // A stride of 0 lets one row of costs per stage serve all micro-batches.
        let costs_stride = if costs.compute.len() == stages { 0 } else { stages };
        let queued = links == Links::Queued;
        let mut makespan_s: f64 = 0.0;
        let mut left: usize = schedule.action_lists.iter().map(Vec::len).sum();

        self.awake.clear();
        // Start with rank 0, which has its inputs: the stack is popped from its end.
        self.awake.extend((0..schedule.action_lists.len()).rev().map(|rank| u32::try_from(rank).unwrap_or(NOBODY)));
        while let Some(rank) = self.awake.pop() {
            let rank = rank as usize;
            let order = &schedule.action_lists[rank];
            // Copy the state into registers for the inner loop. `deliver` never changes the lane of the rank that runs:
            // that rank is awake.
            let mut lane = self.lanes[rank];
            lane.waits_for = NOTHING;
            while let Some(action) = order.get(lane.next) {
                let (stage, micro_batch) = (action.stage as usize, action.micro_batch as usize);
                let slot = micro_batch * stages + stage;
                let times = &costs.compute[micro_batch * costs_stride + stage];
                match action.kind {
                    Kind::Forward => {
                        let ready_s = self.ready_s[slot];
                        if ready_s == ABSENT {
                            lane.waits_for = slot;
                            break;
                        }
                        let end_s = run_one(&mut lane, rank, ready_s, times.forward_s, &mut record);
                        self.deliver(stage, slot, end_s, queued);
                    }
                    Kind::Backward | Kind::InputGradient => {
                        let ready_s = self.ready_s[slots + slot];
                        if ready_s == ABSENT {
                            lane.waits_for = slots + slot;
                            break;
                        }
                        let duration_s = match action.kind {
                            Kind::Backward => times.backward_s,
                            _ => times.input_gradient_s,
                        };
                        let end_s = run_one(&mut lane, rank, ready_s, duration_s, &mut record);
                        self.last_backward_s[stage] = end_s;
                        self.deliver(stages + stage, slot, end_s, queued);
                    }
                    Kind::WeightGradient => {
                        // Its input gradient ran earlier on this rank, so it never waits. The gradient reduction waits
                        // for it, so it counts as a backward below.
                        let end_s = run_one(&mut lane, rank, 0.0, times.weight_gradient_s, &mut record);
                        self.last_backward_s[stage] = end_s;
                    }
                    Kind::Overlapped => {
                        let (back_stage, back_micro_batch) = (action.backward.0 as usize, action.backward.1 as usize);
                        let back_slot = back_micro_batch * stages + back_stage;
                        let back_index = slots + back_slot;
                        let ready_s = self.ready_s[slot].max(self.ready_s[back_index]);
                        if ready_s == ABSENT {
                            // Wait for one missing input at a time. If the other is missing too, the rank sleeps again
                            // on that one.
                            lane.waits_for = if self.ready_s[slot] == ABSENT { slot } else { back_index };
                            break;
                        }
                        let back_times = &costs.compute[back_micro_batch * costs_stride + back_stage];
                        let duration_s = overlapped_s(times, back_times);
                        let end_s = run_one(&mut lane, rank, ready_s, duration_s, &mut record);
                        self.last_backward_s[back_stage] = end_s;
                        self.deliver(stage, slot, end_s, queued);
                        self.deliver(stages + back_stage, back_slot, end_s, queued);
                    }
                }
            }
            left -= lane.next - self.lanes[rank].next;
            makespan_s = makespan_s.max(lane.free_s);
            self.lanes[rank] = lane;
        }
        if left > 0 {
            return Err(self.stuck(schedule));
        }
        Ok(makespan_s.max(self.tail_s(schedule, costs)))
    }

    /// Makes the input behind a delivery available, and wakes the rank that sleeps on it.
    #[inline]
    fn deliver(&mut self, delivery: usize, slot: usize, end_s: f64, queued: bool) {
        let delivery = self.deliveries[delivery];
        if delivery.to_rank == NOBODY {
            return;
        }
        let sent_s = if queued {
            let free_s = &mut self.link_free_s[delivery.link as usize];
            // Ranks send in the order of their actions, so messages of a link are delivered here in sending order.
            *free_s = free_s.max(end_s) + delivery.cost.busy_s;
            *free_s
        } else {
            end_s + delivery.cost.busy_s
        };
        let index = slot.wrapping_add(delivery.offset);
        self.ready_s[index] = sent_s + delivery.cost.latency_s;
        let lane = &mut self.lanes[delivery.to_rank as usize];
        if lane.waits_for == index {
            lane.waits_for = NOTHING;
            self.awake.push(delivery.to_rank);
        }
    }

    /// Returns the end of the last optimizer step in seconds, or 0 if no stage has a backward.
    ///
    /// Copies of a stage in several chains reduce their gradients together, so all wait for the last of them.
    fn tail_s(&self, schedule: &Schedule, costs: &Costs) -> f64 {
        let chain = schedule.stages_per_pipeline as usize;
        let stages = self.last_backward_s.len();
        let mut tail_s: f64 = 0.0;
        for stage in 0..stages {
            let copies = (stage % chain..stages).step_by(chain);
            let last_s = copies.map(|copy| self.last_backward_s[copy]).fold(f64::NEG_INFINITY, f64::max);
            // Stages without backwards have negative infinity. A stage that takes no time ends at 0, which counts.
            if last_s >= 0.0 {
                tail_s = tail_s.max(last_s + costs.gradient_sync_s[stage] + costs.optimizer_s[stage]);
            }
        }
        tail_s
    }

    /// Returns the error of a run that stopped early, with one of the waiting actions.
    fn stuck(&self, schedule: &Schedule) -> Error {
        let stages = schedule.rank_of_stage.len();
        let slots = self.ready_s.len() / 2;
        let waiting = self.lanes.iter().enumerate().find(|(_, lane)| lane.waits_for != NOTHING);
        let (rank, lane) = waiting.expect("a run that stopped early has a waiting rank");
        let (what, slot) = if lane.waits_for < slots {
            ("the forward", lane.waits_for)
        } else {
            ("the backward", lane.waits_for - slots)
        };
        Error::schedule(
            format!(
                "the actions of `{}` wait for each other: rank {rank} never gets the input of {what} of micro-batch {} \
                 at stage {}",
                schedule.name,
                slot / stages,
                slot % stages
            ),
            "validate the schedule to see the cycle of waiting actions",
        )
    }
}

/// Runs one action on a lane. Returns its end in seconds.
#[inline]
fn run_one(
    lane: &mut Lane,
    rank: usize,
    ready_s: f64,
    duration_s: f64,
    record: &mut impl FnMut(usize, usize, f64, f64),
) -> f64 {
    let start_s = lane.free_s.max(ready_s);
    let end_s = start_s + duration_s;
    record(rank, lane.next, start_s, end_s);
    lane.next += 1;
    lane.free_s = end_s;
    end_s
}

/// Returns the duration of a fused forward and whole backward, in seconds.
#[inline]
fn overlapped_s(forward: &StageTimes, backward: &StageTimes) -> f64 {
    forward.overlapped_s.unwrap_or(forward.forward_s + backward.backward_s)
}
