//! The best cuts for a pattern, found by bisection of a limit on the longest stage.
//!
//! For each limit, stages are chosen from the last one back, each as long as the limit allows. Without memory and
//! links, a stage that reaches back as far as possible leaves least to the stages in front, so these cuts keep the
//! limit if any do. Transfers and buffers differ from cut to cut, so with them the choice is good but not always the
//! best.

use super::patterns::Patterns;
use crate::cost::network::Rate;
use crate::cost::{SyncTail, Totals};
use crate::planner::effort::placement;
use crate::planner::hybrid::{
    bounds::link_bounds::first,
    evaluate::stage_cost::StageDevices,
    search::unscheduled_plan::{PlanScorer, UnscheduledPlan},
    subproblem::Subproblem,
};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Devices and links of the stages of a pattern, independent of their layers.
pub(super) struct Shape {
    pub(super) stages: Vec<StageDevices>,
    /// Transfer rate of each stage to the next one.
    pub(super) rates: Vec<Rate>,
}

impl Shape {
    pub(super) fn of(unscheduled: &mut UnscheduledPlan, scorer: &mut PlanScorer<'_>) -> Self {
        Self {
            stages: (0..unscheduled.stages()).map(|stage| scorer.devices_of(unscheduled, stage)).collect(),
            rates: (1..unscheduled.stages()).map(|stage| scorer.rate(unscheduled, stage - 1)).collect(),
        }
    }
}

impl Shape {
    /// Returns a key that is equal for shapes with equal costs of stages and links.
    pub(super) fn key(&self) -> Arc<[u64]> {
        let stages = self.stages.iter().flat_map(|&StageDevices { replicas, pace, memory_bytes, sync }| {
            let of_devices = [memory_bytes, sync.s_per_byte, sync.latency_s].map(f64::to_bits);
            std::iter::once(u64::from(replicas)).chain(pace.key()).chain(of_devices)
        });
        stages.chain(self.rates.iter().flat_map(|rate| [rate.s_per_byte, rate.latency_s].map(f64::to_bits))).collect()
    }
}

/// Cached times of replicated stages, up to `max_s`, including the exposed all-reduce.
///
/// The key is the micro-batch size, the devices, and the cut where the stages end. Each stage of a list contains the
/// stage before it, with one cut more.
pub(super) struct Reached {
    pub(super) max_s: f64,
    pub(super) known: FxHashMap<(usize, [u64; 5], usize), Vec<f64>>,
}

impl Reached {
    pub(super) fn new(max_s: f64) -> Self {
        Self { max_s, known: FxHashMap::default() }
    }
}

impl Patterns<'_> {
    /// Returns cuts whose longest stage or transfer is about as short as possible, or `None` if nothing fits below
    /// `limit_s`.
    pub(super) fn best_cuts(
        &self,
        shape: &Shape,
        task: usize,
        limit_s: f64,
        reached: &mut Reached,
    ) -> Option<Vec<u32>> {
        let (index, task) = (task, self.tasks[task]);
        // The bisection starts from a limit below which there are no cuts: all stages are equally long, and compute at
        // the best number of samples.
        let min_s = shape.stages.iter().filter_map(|stage| task.totals_index[stage.replicas as usize]);
        let min_s =
            min_s.map(|totals_index| whole_s(task, &task.totals[totals_index as usize])).fold(f64::INFINITY, f64::min);
        let mut low_s =
            f64::from(task.micro_batches) * min_s / shape.stages.iter().map(|stage| stage.pace.speed).sum::<f64>();
        if low_s * (1.0 - 1e-9) >= limit_s {
            return None;
        }
        let (mut high_s, mut cuts) = self.cuts_within(shape, index, limit_s, reached)?;
        // Each limit takes one pass over the stages. So the bisection stops at a tolerance instead of the last digit.
        for _ in 0..placement::MAX_BISECTIONS {
            if high_s - low_s <= placement::STAGE_TOLERANCE * high_s {
                break;
            }
            let middle_s = f64::midpoint(low_s, high_s);
            match self.cuts_within(shape, index, middle_s, reached) {
                // The cuts found may be shorter than the limit, which saves further bisections.
                Some((max_s, found)) => (high_s, cuts) = (max_s.min(middle_s), found),
                None => low_s = middle_s,
            }
        }
        Some(cuts)
    }

    /// Returns cuts with which every stage, including its exposed all-reduce, and every link is busy for less than
    /// `limit_s`, together with the longest of these times. `None` if no such cuts were found.
    pub(super) fn cuts_within(
        &self,
        shape: &Shape,
        task: usize,
        limit_s: f64,
        reached: &mut Reached,
    ) -> Option<(f64, Vec<u32>)> {
        let (index, task) = (task, self.tasks[task]);
        let stages = shape.stages.len();
        let micro = f64::from(task.micro_batches);
        let memory = &task.settings.memory;
        let overlap = task.settings.overlap_sync;
        let mut cuts = vec![0; stages + 1];
        let mut end = self.line.len() - 1;
        cuts[stages] = self.line[end];
        let mut all_s: f64 = 0.0;
        for (from_end, stage) in (1..).zip((0..stages).rev()) {
            let StageDevices { replicas, pace, memory_bytes, sync } = shape.stages[stage];
            let totals = &task.totals[task.totals_index[replicas as usize]? as usize];
            let last = self.line[end] as usize;
            // Go back to the first cut with which the stage keeps the limit. Each stage in front needs at least one
            // layer.
            let all_work_s = |begin: usize| {
                let (forward_s, backward_s) = totals.longest_s(pace, (self.line[begin] as usize, last));
                micro * (forward_s + backward_s + (task.recompute.min_forwards() - 1.0) * forward_s)
            };
            let mut reached_s: &[f64] = &[];
            // All-reduce times have no closed form, so they are computed cut by cut and cached for all patterns with
            // these devices. A stage with one replica has none: its cut follows from prefix sums by bisection.
            let mut begin = if replicas > 1 {
                let Reached { max_s, ref mut known } = *reached;
                let [speed, kinds] = pace.key();
                let devices = [u64::from(replicas), speed, kinds, sync.s_per_byte.to_bits(), sync.latency_s.to_bits()];
                reached_s = known.entry((index, devices, end)).or_insert_with(|| {
                    // On several kinds of devices, bounding times stand for all of them: the cuts need not be exact.
                    let tail = SyncTail::new(self.model, totals.at_speed(pace.speed), sync, overlap);
                    let mut sync = tail.ordered(self.in_order);
                    let reached_s = |begin| all_work_s(begin) + sync.extend(self.layers[begin + 1].iter().copied());
                    let mut all_s = Vec::with_capacity(end);
                    all_s.extend((0..end).rev().map(reached_s).take_while(|&reached_s| reached_s < max_s));
                    all_s
                });
                end - reached_s.iter().take(end - stage).take_while(|&&reached_s| reached_s < limit_s).count()
            } else {
                first(stage as u32, end as u32, |begin| all_work_s(begin as usize) < limit_s) as usize
            };
            // The smallest number in flight needs the least memory. Larger ones are chosen later, if they fit.
            let max_in_flight = task.settings.max_in_flights(from_end, task.micro_batches).0;
            let capacity_bytes = memory_bytes - memory.reserved_bytes;
            let link_s = |cut: usize| {
                if stage == 0 { 0.0 } else { micro * task.cut_bytes[cut] * shape.rates[stage - 1].s_per_byte }
            };
            // Shorten the stage until the transfer in front of it keeps the limit and its memory fits.
            loop {
                if begin == end || (stage == 0 && begin > 0) {
                    return None;
                }
                let cut = self.line[begin] as usize;
                let fits = || task.memory(totals, (cut, last), replicas).least_bytes(max_in_flight) <= capacity_bytes;
                if link_s(cut) < limit_s && fits() {
                    break;
                }
                begin += 1;
            }
            let reached_s = if replicas > 1 { reached_s[end - begin - 1] } else { all_work_s(begin) };
            all_s = all_s.max(reached_s).max(link_s(self.line[begin] as usize));
            cuts[stage] = self.line[begin];
            end = begin;
        }
        Some((all_s, cuts))
    }
}

/// Returns the time of one micro-batch through all layers at speed 1.
pub(super) fn whole_s(task: &Subproblem<'_>, totals: &Totals) -> f64 {
    let (forward_s, backward_s) = (totals.forward_s.last(), totals.backward_s.last());
    let forwards = task.recompute.min_forwards();
    forwards * forward_s.copied().unwrap_or(0.0) + backward_s.copied().unwrap_or(0.0)
}
