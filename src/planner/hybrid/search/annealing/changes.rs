//! Random changes of a plan: cuts move, devices move between stages, stages split and merge.

use super::random::Random;
use super::{Annealer, AnnealingRound};
use crate::planner::hybrid::{placement::cut_row::is_nested, search::unscheduled_plan::UnscheduledPlan};

impl Annealer<'_> {
    /// Changes a plan at random, as suits the round. Returns whether that was possible. If not, the plan may be partly
    /// changed.
    pub(super) fn change_of(&self, round: AnnealingRound, plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        // Near the optimum, stages are balanced. A device alone, or a stage less, then helps only if layers follow.
        match if round.is_around_best { random.below(16) } else { 15 } {
            0..3 => self.hand_over_with_layers(plan, random),
            3 => self.drop_stage(plan, random),
            _ => self.change(plan, random),
        }
    }

    /// Changes a plan at random. Returns whether that was possible. If not, the plan may be partly changed.
    fn change(&self, plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        // Weights in percent. Moves of one cut keep the caches of devices and transfers, so they are also the cheapest.
        match random.below(100) {
            0..36 => self.shift(plan, random),
            36..43 => self.shift_many(plan, random),
            43..59 => Self::hand_over(plan, random),
            59..66 => Self::swap(plan, random),
            66..70 => Self::take_free(plan, random),
            70..74 => Self::give_up(plan, random),
            74..79 => Self::move_away(plan, random),
            79..85 => Self::hand_over_everywhere(plan, random),
            85..89 => self.split(plan, random),
            89..93 => Self::merge(plan, random),
            93..97 => self.change_task(plan, random),
            _ => Self::exchange(plan, random),
        }
    }

    /// Moves one cut to a random place nearby.
    fn shift(&self, plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        if plan.stages() < 2 {
            return false;
        }
        let border = 1 + random.below(plan.stages() - 1);
        let (begin, end) = (plan.cuts[border - 1], plan.cuts[border + 1]);
        let Some(cut) = self.near((begin, plan.cuts[border], end), None, random) else { return false };
        plan.cut_at(border, cut);
        true
    }

    /// Returns a cut near `cut`, between `begin` and `end`: a larger one if `is_ahead`, a smaller one if not, and any if
    /// that is `None`.
    fn near(&self, (begin, cut, end): (u32, u32, u32), is_ahead: Option<bool>, random: &mut Random) -> Option<u32> {
        // Mostly one or two cuts away, sometimes eight times as far to leave a local optimum.
        let distance = random.distance() * if random.below(8) == 0 { 8 } else { 1 };
        let is_ahead = is_ahead.unwrap_or_else(|| random.is_heads());
        // `begins_behind` counts from the largest cut down, so a smaller index is a larger cut.
        let at = self.model.begins_behind(end as usize, cut as usize);
        let at = if is_ahead { at.checked_sub(distance)? } else { at + distance };
        let other = self.model.begin_at(end as usize, at)?;
        // The new cut must leave layers on both sides. In a branching model it must also be nested between its
        // neighbors.
        (other > begin && (self.model.is_chain || is_nested(self.model, begin, other))).then_some(other)
    }

    /// Moves several neighboring cuts by the same distance.
    fn shift_many(&self, plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        if plan.stages() < 3 {
            return false;
        }
        let first = 1 + random.below(plan.stages() - 1);
        let last = first + random.below(plan.stages() - first);
        let distance = random.distance();
        self.shift_run(plan, (first, last), distance, random.is_heads())
    }

    /// Moves the cuts from one border to another by a number of positions in the line of cuts. Returns whether that was
    /// possible.
    pub(super) fn shift_run(
        &self,
        plan: &mut UnscheduledPlan,
        (first, last): (usize, usize),
        distance: usize,
        is_ahead: bool,
    ) -> bool {
        for border in first..=last {
            let Some(at) = self.place[plan.cuts[border] as usize] else { return false };
            let at = if is_ahead { Some(at + distance) } else { at.checked_sub(distance) };
            let Some(&cut) = at.and_then(|at| self.line.get(at)) else { return false };
            plan.cut_at(border, cut);
        }
        // Inside the run all cuts move along the line, which is nested. Only its two ends can break the nesting.
        let is_between =
            |begin: u32, end: u32| begin < end && (self.model.is_chain || is_nested(self.model, begin, end));
        is_between(plan.cuts[first - 1], plan.cuts[first]) && is_between(plan.cuts[last], plan.cuts[last + 1])
    }

    /// Moves devices of one node from one stage to another.
    fn hand_over(plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let Some((from, to)) = two_stages(plan, random) else { return false };
        let Some(node) = node_of(plan.row(from), random) else { return false };
        let count = some_of(plan.row(from)[node], random);
        plan.move_devices(node, count, Some(from), Some(to));
        true
    }

    /// Moves devices of one node to a neighboring stage, and the cut between both stages so that layers follow them.
    fn hand_over_with_layers(&self, plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        if plan.stages() < 2 {
            return false;
        }
        let border = 1 + random.below(plan.stages() - 1);
        let (begin, end) = (plan.cuts[border - 1], plan.cuts[border + 1]);
        let (from, to) = if random.is_heads() { (border - 1, border) } else { (border, border - 1) };
        let Some(node) = node_of(plan.row(from), random) else { return false };
        let count = some_of(plan.row(from)[node], random);
        let Some(cut) = self.near((begin, plan.cuts[border], end), Some(to < from), random) else { return false };
        plan.move_devices(node, count, Some(from), Some(to));
        plan.cut_at(border, cut);
        true
    }

    /// Swaps devices of two stages that are on different nodes.
    fn swap(plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let Some((one, other)) = two_stages(plan, random) else { return false };
        let Some(here) = node_of(plan.row(one), random) else { return false };
        let Some(there) = node_of(plan.row(other), random) else { return false };
        if here == there {
            return false;
        }
        let count = some_of(plan.row(one)[here].min(plan.row(other)[there]), random);
        plan.move_devices(here, count, Some(one), Some(other));
        plan.move_devices(there, count, Some(other), Some(one));
        true
    }

    /// Adds free devices to a stage.
    fn take_free(plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let stage = random.below(plan.stages());
        let Some(node) = node_of(&plan.free, random) else { return false };
        let count = some_of(plan.free[node], random);
        plan.move_devices(node, count, None, Some(stage));
        true
    }

    /// Frees devices of a stage.
    fn give_up(plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let stage = random.below(plan.stages());
        let Some(node) = node_of(plan.row(stage), random) else { return false };
        let count = some_of(plan.row(stage)[node], random);
        plan.move_devices(node, count, Some(stage), None);
        true
    }

    /// Replaces devices of a stage by free devices of another node.
    fn move_away(plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let stage = random.below(plan.stages());
        let Some(here) = node_of(plan.row(stage), random) else { return false };
        let Some(there) = node_of(&plan.free, random) else { return false };
        if here == there {
            return false;
        }
        let count = some_of(plan.row(stage)[here].min(plan.free[there]), random);
        plan.move_devices(here, count, Some(stage), None);
        plan.move_devices(there, count, None, Some(stage));
        true
    }

    /// Moves the same number of devices from one stage to another on every node where the first one has enough.
    fn hand_over_everywhere(plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let Some((from, to)) = two_stages(plan, random) else { return false };
        // Stages spread over many nodes would need one change per node, each of which alone may be worse.
        let min = plan.row(from).iter().copied().filter(|&count| count > 0).min().unwrap_or(0);
        let count = if random.is_heads() { 1 } else { 1 + random.below(min as usize) as u32 };
        let mut is_changed = false;
        for node in 0..plan.free.len() {
            if plan.row(from)[node] >= count && plan.row(from)[node] > 0 {
                plan.move_devices(node, count, Some(from), Some(to));
                is_changed = true;
            }
        }
        is_changed
    }

    /// Splits a stage in two. Each gets half of its devices on every node, or some nodes completely.
    fn split(&self, plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let stage = random.below(plan.stages());
        let (begin, end) = (plan.cuts[stage], plan.cuts[stage + 1]);
        let inside = self.model.begins_behind(end as usize, begin as usize);
        if inside == 0 {
            return false;
        }
        let Some(cut) = self.model.begin_at(end as usize, random.below(inside)) else { return false };
        if !self.model.is_chain && !is_nested(self.model, begin, cut) {
            return false;
        }
        plan.split(stage, cut);
        // Halving on every node keeps the spread, splitting by node keeps transfers inside nodes. Either may be better.
        let by_node = random.is_heads();
        let mut is_rounded_up = random.is_heads();
        for node in 0..plan.free.len() {
            let count = plan.row(stage)[node];
            let handed = if by_node {
                if random.is_heads() { count } else { 0 }
            } else if count.is_multiple_of(2) {
                count / 2
            } else {
                // Odd counts round up and down in turn, so that both stages get about the same number of devices.
                is_rounded_up = !is_rounded_up;
                count / 2 + u32::from(is_rounded_up)
            };
            if handed > 0 {
                plan.move_devices(node, handed, Some(stage), Some(stage + 1));
            }
        }
        true
    }

    /// Merges two neighboring stages.
    fn merge(plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        if plan.stages() < 2 {
            return false;
        }
        plan.merge(random.below(plan.stages() - 1));
        true
    }

    /// Removes a stage and gives its layers to another one. The cuts between both move, so that the stages between them
    /// keep their numbers of layers. The devices become free, or follow the layers.
    fn drop_stage(&self, plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let Some((stage, to)) = two_stages(plan, random) else { return false };
        let place = |cut: u32| self.place[cut as usize];
        let (Some(begin), Some(end)) = (place(plan.cuts[stage]), place(plan.cuts[stage + 1])) else { return false };
        let receiver = random.is_heads().then_some(to);
        for node in 0..plan.free.len() {
            let count = plan.row(stage)[node];
            if count > 0 {
                plan.move_devices(node, count, Some(stage), receiver);
            }
        }
        // The joined stage takes the place of the stage next to the removed one, which then gives the same number of layers
        // to the next one, and so on up to the receiver.
        let is_before = to < stage;
        plan.merge(if is_before { stage - 1 } else { stage });
        let run = if is_before { (to + 1, stage - 1) } else { (stage + 1, to - 1) };
        run.0 > run.1 || self.shift_run(plan, run, end - begin, is_before)
    }

    /// Changes the micro-batch size or recomputation.
    fn change_task(&self, plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let distance = random.distance();
        let task = if random.is_heads() { Some(plan.task + distance) } else { plan.task.checked_sub(distance) };
        let Some(task) = task.filter(|&task| task < self.tasks.len()) else { return false };
        plan.set_pipeline_micro_batch_size(task);
        true
    }

    /// Swaps all devices of two stages.
    fn exchange(plan: &mut UnscheduledPlan, random: &mut Random) -> bool {
        let Some((one, other)) = two_stages(plan, random) else { return false };
        plan.exchange(one, other);
        true
    }
}

/// Returns two different stages, neighbors with a probability of about two thirds.
fn two_stages(plan: &UnscheduledPlan, random: &mut Random) -> Option<(usize, usize)> {
    let stages = plan.stages();
    if stages < 2 {
        return None;
    }
    if random.below(3) > 0 {
        let first = random.below(stages - 1);
        return Some(if random.is_heads() { (first, first + 1) } else { (first + 1, first) });
    }
    let one = random.below(stages);
    let other = random.below(stages - 1);
    Some((one, if other >= one { other + 1 } else { other }))
}

/// Returns a node with devices in `row`, or `None` if there is none.
fn node_of(row: &[u32], random: &mut Random) -> Option<usize> {
    // The search starts at a random node and takes the next one with devices, so it ends after one turn.
    let start = random.below(row.len());
    (start..row.len()).chain(0..start).find(|&node| row[node] > 0)
}

/// Returns a number from 1 to `count`: mostly 1, sometimes all of them.
fn some_of(count: u32, random: &mut Random) -> u32 {
    match random.below(8) {
        0..5 => 1,
        5..7 => count,
        _ => 1 + random.below(count as usize) as u32,
    }
}
