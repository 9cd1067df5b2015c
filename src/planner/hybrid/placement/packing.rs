//! Packed plans: the smallest number of devices that holds the model within a time limit, without regard to links.
//!
//! ```text
//! fewest[stages][cut]    devices of that many stages between the cut and the end, none of them longer than a limit
//! ```
//!
//! Devices are assigned in a fixed order, the largest first, so every entry is a plan that can be evaluated. The search
//! starts from the best of these plans. For a problem without a plan, devices are given more memory than they have: the
//! smallest addition that gives a plan is the memory that the problem lacks.

use crate::control::Control;
use crate::cost::Memory;
use crate::planner::effort::placement;
use crate::planner::hybrid::{
    evaluate::candidate_plan::{CandidatePlan, StageCandidate},
    settings::Recompute,
    subproblem::Subproblem,
};

/// A suffix of a plan that begins at a given cut.
#[derive(Debug, Clone, Copy)]
struct Entry {
    used: u32,
    replicas: u32,
    /// Cut where the second stage begins.
    next: usize,
}

/// Packs plans of one micro-batch size.
pub(crate) struct Packing<'a> {
    task: &'a Subproblem<'a>,
    /// Nested cuts from the empty one to the full one.
    cuts: Vec<usize>,
    /// Node of each device, in the order in which devices are assigned.
    nodes: Vec<u32>,
    /// Smallest replica count for each number of samples, with the index of its sums.
    splits: Vec<(u32, u32)>,
}

impl<'a> Packing<'a> {
    pub(crate) fn new(task: &'a Subproblem<'a>) -> Self {
        Self::with_cuts(task, placement::PACKED_CUTS)
    }

    /// Packs at fewer cuts, to explain a shortage of memory. Half the cuts make this about eight times faster.
    pub(crate) fn coarse(task: &'a Subproblem<'a>) -> Self {
        Self::with_cuts(task, placement::COARSE_CUTS)
    }

    fn with_cuts(task: &'a Subproblem<'a>, max_cuts: usize) -> Self {
        // One chain through the cuts is enough, since packing only has to find some plan. The largest inner cut comes
        // first, so the chain is as fine as possible.
        let mut cuts = vec![task.model.cuts() - 1];
        while let Some(inner) = cuts.last().and_then(|&cut| task.model.begins(cut).next()) {
            cuts.push(inner as usize);
        }
        cuts.reverse();
        let step = cuts.len().div_ceil(max_cuts);
        let whole = cuts.len() - 1;
        let cuts = (cuts.into_iter().enumerate())
            .filter(|(at, _)| at.is_multiple_of(step) || *at == whole)
            .map(|(_, cut)| cut)
            .collect();
        let all = &task.cluster.nodes;
        // The last stage takes the first devices of this order. Stages are packed from the end, and reversing the
        // nodes keeps device numbers ascending along the pipeline.
        let mut order: Vec<u32> = (0..all.len() as u32).rev().collect();
        order.sort_by(|&a, &b| {
            let (a, b) = (&all[a as usize], &all[b as usize]);
            b.memory_bytes.total_cmp(&a.memory_bytes).then(b.speed.total_cmp(&a.speed))
        });
        let nodes = (order.into_iter())
            .flat_map(|node| std::iter::repeat_n(node, all[node as usize].devices as usize))
            .collect();
        let mut splits: Vec<(u32, u32)> = Vec::new();
        // Only the smallest count for each number of samples is kept: more replicas take more devices and are not
        // faster.
        for (replicas, totals_index) in (0_u32..).zip(&task.totals_index) {
            if let Some(totals_index) = *totals_index
                && splits.last().is_none_or(|&(_, last)| last != totals_index)
            {
                splits.push((replicas, totals_index));
            }
        }
        Self { task, cuts, nodes, splits }
    }

    /// Returns plans that fit, for several numbers of stages, with stages that are about as short as possible.
    pub(crate) fn plans(&self, control: &Control) -> Vec<CandidatePlan> {
        let Some(&(_, totals_index)) = self.splits.first() else { return Vec::new() };
        let totals = &self.task.totals[totals_index as usize];
        let whole_s: f64 = totals.forward_s.last().into_iter().chain(totals.backward_s.last()).sum();
        let even_s = whole_s / f64::from(self.task.max_devices());
        // If every stage has one device, plans have many stages or long ones, so more stages are allowed.
        let few = if self.splits.len() > 1 { placement::PACKED_STAGES } else { placement::PACKED_CUTS };
        let mut plans = Vec::new();
        let mut kept = 0;
        // Limits ascend from the mean time per device, so the first limits that give plans give the most balanced ones.
        for factor in placement::STAGE_LIMITS {
            let found = self.pack(factor * even_s, 0.0, few, few, control);
            kept += usize::from(!found.is_empty());
            plans.extend(found);
            if kept == placement::STAGE_LIMITS_KEPT {
                break;
            }
        }
        // Without a time limit, memory alone decides, so this finds a plan whenever packing can.
        if plans.is_empty() { self.pack(f64::INFINITY, 0.0, placement::PACKED_CUTS, 1, control) } else { plans }
    }

    /// Returns whether some packed plan fits.
    pub(crate) fn has_plan(&self, control: &Control) -> bool {
        !self.pack(f64::INFINITY, 0.0, placement::PACKED_CUTS, 1, control).is_empty()
    }

    /// Returns the plan that lacks least memory, with the bytes that it lacks, or `None` if that is `max_bytes` or
    /// more.
    pub(crate) fn closest(&self, max_bytes: f64, control: &Control) -> Option<(f64, CandidatePlan)> {
        let pack =
            |extra_bytes| self.pack(f64::INFINITY, extra_bytes, placement::PACKED_CUTS, 1, control).into_iter().next();
        let mut high_bytes = max_bytes.min(self.one_stage_bytes()?);
        let mut plan = pack(high_bytes)?;
        let mut low_bytes = high_bytes * 1e-6;
        for _ in 0..placement::SHORTFALL_BISECTIONS {
            // The geometric mean, because the ends are six orders of magnitude apart.
            let middle_bytes = (low_bytes * high_bytes).sqrt();
            match pack(middle_bytes) {
                Some(found) => (high_bytes, plan) = (middle_bytes, found),
                None => low_bytes = middle_bytes,
            }
        }
        Some((high_bytes, plan))
    }

    /// Returns the memory that a single stage of the whole model needs, reserved memory included.
    fn one_stage_bytes(&self) -> Option<f64> {
        let &(replicas, totals_index) = self.splits.first()?;
        let bytes = self.memory((0, *self.cuts.last()?), replicas, totals_index, 1).total_bytes();
        // The margin covers rounding of the sums.
        Some((bytes + self.task.settings.memory.reserved_bytes) * 1.01)
    }

    /// Returns the memory of a stage with the smallest number in flight for its distance from the end.
    fn memory(&self, ends: (usize, usize), replicas: u32, totals_index: u32, from_end: u32) -> Memory {
        let task = self.task;
        let max_in_flight = task.settings.max_in_flights(from_end, task.micro_batches).0;
        let totals = &task.totals[totals_index as usize];
        task.memory(totals, ends, replicas).least(max_in_flight)
    }

    /// Returns plans with at most `max_stages` stages, each at most `limit_s` per micro-batch, on devices with
    /// `extra_bytes` more memory.
    ///
    /// Plans with the fewest stages come first. Numbers of stages above [`placement::PACKED_STAGES`] are considered
    /// only where they save devices.
    fn pack(
        &self,
        limit_s: f64,
        extra_bytes: f64,
        max_stages: usize,
        max_plans: usize,
        control: &Control,
    ) -> Vec<CandidatePlan> {
        let last = self.cuts.len() - 1;
        let max_stages = max_stages.min(self.task.settings.max_stages as usize);
        let mut fewest: Vec<Vec<Option<Entry>>> = vec![vec![None; last + 1]];
        fewest[0][last] = Some(Entry { used: 0, replicas: 0, next: last });
        // For each cut, the fewest devices so far. More stages are considered only if they take fewer.
        let mut min = vec![u32::MAX; last + 1];
        let mut plans = Vec::new();
        for stages in 1..=max_stages {
            let mut row: Vec<Option<Entry>> = vec![None; last + 1];
            for (end, behind) in fewest[stages - 1].iter().enumerate().skip(1) {
                let Some(behind) = behind else { continue };
                // The first row is always completed, so that a stopped search still has a plan with one stage if it
                // fits.
                if stages > 1 && control.should_stop() {
                    return plans;
                }
                let mut split = 0;
                for begin in (0..end).rev() {
                    let stage = (self.cuts[begin], self.cuts[end]);
                    let smallest = |from, bytes: fn(&Memory) -> f64| {
                        self.smallest(stage, stages as u32, behind.used, from, limit_s, extra_bytes, bytes)
                    };
                    // Weights, gradients and optimizer state grow with the stage, so the number of replicas never
                    // falls, and no longer stage fits once none does. Buffers may shrink, so the total is tested
                    // separately.
                    let grows = |held: &Memory| held.weights_bytes + held.gradients_bytes + held.optimizer_bytes;
                    let Some(first) = smallest(split, grows) else { break };
                    split = first;
                    let Some(found) = smallest(split, Memory::total_bytes) else { continue };
                    let replicas = self.splits[found].0;
                    let used = behind.used + replicas;
                    if row[begin].is_none_or(|entry| used < entry.used) {
                        row[begin] = Some(Entry { used, replicas, next: end });
                    }
                }
            }
            for (entry, min) in row.iter_mut().zip(&mut min) {
                match entry {
                    Some(found) if found.used < *min => *min = found.used,
                    Some(_) if stages > placement::PACKED_STAGES => *entry = None,
                    _ => {}
                }
            }
            if row.iter().all(Option::is_none) {
                break; // no stage can be put in front of an empty row
            }
            fewest.push(row);
            if fewest[stages][0].is_some() {
                plans.push(self.plan(&fewest, stages));
            }
            if plans.len() == max_plans {
                break;
            }
        }
        plans
    }

    /// Returns the first index of `splits`, from `split` on, at which the time of a stage keeps the limit and the part
    /// of its memory that `bytes` selects fits.
    #[expect(clippy::too_many_arguments, reason = "a stage, and what it must keep")]
    fn smallest(
        &self,
        (begin, end): (usize, usize),
        from_end: u32,
        used: u32,
        split: usize,
        limit_s: f64,
        extra_bytes: f64,
        bytes: fn(&Memory) -> f64,
    ) -> Option<usize> {
        let reserved_bytes = self.task.settings.memory.reserved_bytes;
        (split..self.splits.len()).find_map(|split| {
            let (replicas, totals_index) = self.splits[split];
            // Devices are assigned by falling memory, so the last device of the stage is the smallest.
            let &node = self.nodes.get((used + replicas) as usize - 1)?;
            let node = &self.task.cluster.nodes[node as usize];
            let totals = &self.task.totals[totals_index as usize];
            let work_s =
                totals.forward_s[end] - totals.forward_s[begin] + totals.backward_s[end] - totals.backward_s[begin];
            let fits = bytes(&self.memory((begin, end), replicas, totals_index, from_end))
                <= node.memory_bytes - reserved_bytes + extra_bytes;
            (fits && work_s <= limit_s * node.speed).then_some(split)
        })
    }

    /// Reads the plan with `stages` stages from the table, first stage first.
    fn plan(&self, fewest: &[Vec<Option<Entry>>], stages: usize) -> CandidatePlan {
        let task = self.task;
        let mut chosen = Vec::new();
        let mut at = 0;
        for from_end in (1..=stages).rev() {
            let entry = fewest[from_end][at].expect("every entry but the last begins at another one");
            let mut footprint: Vec<(u32, u32)> = Vec::new();
            let taken = (entry.used - entry.replicas) as usize..entry.used as usize;
            for &node in self.nodes[taken].iter().rev() {
                match footprint.last_mut() {
                    Some((last, count)) if *last == node => *count += 1,
                    _ => footprint.push((node, 1)),
                }
            }
            footprint.sort_unstable();
            let max_in_flight = task.settings.max_in_flights(from_end as u32, task.micro_batches).0;
            let (begin, end) = (self.cuts[at], self.cuts[entry.next]);
            // `PlanEvaluator::settle` lets stages that fit keep their activations.
            let recompute = task.recompute != Recompute::Never;
            chosen.push(StageCandidate { begin, end, footprint, max_in_flight, recompute });
            at = entry.next;
        }
        CandidatePlan { micro_batch: task.micro_batch, stages: chosen }
    }
}
