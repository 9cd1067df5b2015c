//! Plans that annealing changes many thousand times: complete plans on any placement, scored by their longest path
//! alone.
//!
//! An [`UnscheduledPlan`] counts devices by stage and node in one table, so a change touches few numbers and allocates
//! no memory. It caches the cost of each stage until the stage changes, each transfer until one of its ends changes,
//! and the paths of all stages behind the last change.

use std::hash::BuildHasher;

use crate::cost::network::{Cluster, Rate};
use crate::cost::{self, Pace};
use crate::planner::hybrid::{
    bounds::paths::Paths,
    evaluate::{
        candidate_plan::{CandidatePlan, StageCandidate},
        in_flight_ranges::{nearest, ranges},
        pipeline_simulator::PipelineSimulator,
        stage_cost::{BaseCost, StageDevices},
    },
    settings::{Recompute, max_fitting_in_flight},
    subproblem::Subproblem,
};

/// A complete plan without numbers of micro-batches in flight: these are as large as memory allows.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct UnscheduledPlan {
    /// Index of its micro-batch size, among the subproblems of the search.
    pub task: usize,
    /// Cuts between stages, the empty and the full one included.
    pub cuts: Vec<u32>,
    /// Devices of each stage on each node, stage by stage.
    pub counts: Vec<u32>,
    /// Devices of each node that are in no stage.
    pub free: Vec<u32>,
    /// Cached devices of each stage.
    stage_devices: Vec<Option<StageDevices>>,
    /// Cached cost of each stage. If each stage may recompute its activations, with kept ones.
    costs: Vec<Option<BaseCost>>,
    /// Cached rate of the transfer from each stage to the next.
    rates: Vec<Option<Rate>>,
    /// Cached paths of the suffixes that have not changed, with the largest numbers in flight. The last stage comes
    /// first.
    suffixes: Vec<Suffix>,
}

/// Paths of a stage and of the stages behind it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Suffix {
    paths: Paths,
    /// Micro-batches in flight of the first stage.
    max_in_flight: u32,
    /// Missing memory as a share of the capacity, summed over the stages.
    overflow: f64,
}

/// Score of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PlanScore {
    /// Longest path, computed as if all stages fitted.
    pub path_s: f64,
    /// Missing memory as a share of the capacity, summed over the stages. 0 if all stages fit.
    pub overflow: f64,
}

impl PlanScore {
    /// Score of an invalid plan.
    // No overflow, so that a plan that is impossible for another reason never counts as close to fitting.
    pub(crate) const IMPOSSIBLE: Self = Self { path_s: f64::INFINITY, overflow: 0.0 };
}

impl UnscheduledPlan {
    pub(crate) fn stages(&self) -> usize {
        self.cuts.len() - 1
    }

    fn nodes(&self) -> usize {
        self.free.len()
    }

    /// Returns the devices of a stage on each node.
    pub(crate) fn row(&self, stage: usize) -> &[u32] {
        let nodes = self.nodes();
        &self.counts[stage * nodes..(stage + 1) * nodes]
    }

    /// Creates a plan with the given counts of devices, by stage and node.
    pub(crate) fn new(cluster: &Cluster, task: usize, cuts: Vec<u32>, counts: Vec<u32>) -> Self {
        let stages = cuts.len() - 1;
        let mut free: Vec<u32> = cluster.nodes.iter().map(|node| node.devices).collect();
        for row in counts.chunks(free.len()) {
            free.iter_mut().zip(row).for_each(|(free, taken)| *free -= taken);
        }
        let (stage_devices, costs, rates) = (vec![None; stages], vec![None; stages], vec![None; stages]);
        Self { task, cuts, counts, free, stage_devices, costs, rates, suffixes: Vec::new() }
    }

    /// Drops the counts of devices. The cached devices and rates suffice to score the plan with other cuts.
    pub(crate) fn without_devices(self) -> Self {
        Self { counts: Vec::new(), free: Vec::new(), ..self }
    }

    /// Converts a plan of the micro-batch size with index `task`.
    pub(crate) fn of(cluster: &Cluster, task: usize, plan: &CandidatePlan) -> Self {
        let nodes = cluster.nodes.len();
        let mut counts = vec![0; plan.stages.len() * nodes];
        for (row, stage) in counts.chunks_mut(nodes).zip(&plan.stages) {
            stage.footprint.iter().for_each(|&(node, count)| row[node as usize] = count);
        }
        let cuts = std::iter::once(0).chain(plan.stages.iter().map(|stage| stage.end as u32)).collect();
        Self::new(cluster, task, cuts, counts)
    }

    /// Converts this plan to a candidate with one micro-batch in flight in each stage.
    pub(crate) fn candidate(&self, task: &Subproblem<'_>) -> CandidatePlan {
        let stages = (0..self.stages())
            .map(|stage| StageCandidate {
                begin: self.cuts[stage] as usize,
                end: self.cuts[stage + 1] as usize,
                footprint: (0..).zip(self.row(stage)).filter(|(_, count)| **count > 0).map(|(m, c)| (m, *c)).collect(),
                max_in_flight: 1,
                recompute: task.recompute == Recompute::Always,
            })
            .collect();
        CandidatePlan { micro_batch: task.micro_batch, stages }
    }

    /// Copies `other`, reusing the allocated memory.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.task = other.task;
        self.cuts.clone_from(&other.cuts);
        self.counts.clone_from(&other.counts);
        self.free.clone_from(&other.free);
        self.stage_devices.clone_from(&other.stage_devices);
        self.costs.clone_from(&other.costs);
        self.rates.clone_from(&other.rates);
        self.suffixes.clone_from(&other.suffixes);
    }

    /// Copies the cuts of `other`, which must have the same devices, reusing the allocated memory.
    pub(crate) fn copy_cuts_from(&mut self, other: &Self) {
        self.cuts.clone_from(&other.cuts);
        self.costs.clone_from(&other.costs);
        self.suffixes.clone_from(&other.suffixes);
    }

    /// Drops the cached paths of all suffixes that contain a stage.
    fn touched(&mut self, stage: usize) {
        // Suffixes are stored from the last stage on, so the ones without this stage are a prefix of the list.
        self.suffixes.truncate(self.stages() - 1 - stage);
    }

    /// Drops the caches of a stage whose devices change, and of its two transfers.
    pub(crate) fn moved(&mut self, stage: usize) {
        self.touched(stage);
        self.stage_devices[stage] = None;
        self.costs[stage] = None;
        self.rates[stage] = None;
        if stage > 0 {
            self.rates[stage - 1] = None;
        }
    }

    /// Moves the cut in front of `stage`, which must not be the first stage.
    pub(crate) fn cut_at(&mut self, stage: usize, cut: u32) {
        self.touched(stage);
        self.cuts[stage] = cut;
        // The devices stay, so the transfer rates of the stage remain valid: they are per byte.
        self.costs[stage] = None;
        self.costs[stage - 1] = None;
    }

    /// Changes the micro-batch size.
    pub(crate) fn set_pipeline_micro_batch_size(&mut self, task: usize) {
        self.task = task;
        // Devices and rates do not depend on the micro-batch size, but every cost does.
        self.costs.fill(None);
        self.suffixes.clear();
    }

    /// Changes the micro-batch size and the cuts.
    pub(crate) fn set_cuts(&mut self, task: usize, cuts: Vec<u32>) {
        self.cuts = cuts;
        self.set_pipeline_micro_batch_size(task);
    }

    /// Returns the number of pairs of a stage and a node on which it has devices.
    pub(crate) fn parts(&self) -> u64 {
        self.counts.iter().filter(|&&count| count > 0).count() as u64
    }

    /// Moves devices of a node from one stage to another. `None` stands for free devices.
    pub(crate) fn move_devices(&mut self, node: usize, count: u32, from: Option<usize>, to: Option<usize>) {
        let nodes = self.nodes();
        for (owner, is_giver) in [(from, true), (to, false)] {
            let held = match owner {
                Some(stage) => {
                    self.moved(stage);
                    &mut self.counts[stage * nodes + node]
                }
                None => &mut self.free[node],
            };
            *held = if is_giver { *held - count } else { *held + count };
        }
    }

    /// Swaps all devices of two stages.
    pub(crate) fn exchange(&mut self, one: usize, other: usize) {
        let nodes = self.nodes();
        for node in 0..nodes {
            self.counts.swap(one * nodes + node, other * nodes + node);
        }
        self.moved(one);
        self.moved(other);
    }

    /// Splits a stage in two. The second one has no devices yet.
    pub(crate) fn split(&mut self, stage: usize, cut: u32) {
        self.touched(stage);
        let at = (stage + 1) * self.nodes();
        self.cuts.insert(stage + 1, cut);
        self.counts.splice(at..at, std::iter::repeat_n(0, self.free.len()));
        self.stage_devices.insert(stage + 1, None);
        self.costs.insert(stage + 1, None);
        self.rates.insert(stage + 1, None);
        self.moved(stage);
    }

    /// Joins a stage and the next, with all their devices.
    pub(crate) fn merge(&mut self, stage: usize) {
        self.touched(stage + 1);
        // Stages are joined with all devices, so no device becomes free.
        let nodes = self.nodes();
        for node in 0..nodes {
            self.counts[stage * nodes + node] += self.counts[(stage + 1) * nodes + node];
        }
        self.counts.drain((stage + 1) * nodes..(stage + 2) * nodes);
        self.cuts.remove(stage + 1);
        self.stage_devices.remove(stage + 1);
        self.costs.remove(stage + 1);
        self.rates.remove(stage + 1);
        self.moved(stage);
    }
}

/// Key of a cached all-reduce time: cuts of the stage, index of its layer sums, and the bits of rate and pace.
type SyncKey = (u32, u32, u32, [u64; 4]);

/// Scores and simulates unscheduled plans. Caches all-reduce times.
pub(crate) struct PlanScorer<'a> {
    pub tasks: &'a [&'a Subproblem<'a>],
    pub cluster: &'a Cluster,
    syncs: Vec<(SyncKey, f64)>,
    pairs: Vec<(u32, u32, u32)>,
    clock: PipelineSimulator,
}

impl<'a> PlanScorer<'a> {
    /// Creates a scorer with a cache of `syncs` all-reduce times.
    pub(crate) fn new(tasks: &'a [&'a Subproblem<'a>], cluster: &'a Cluster, syncs: usize) -> Self {
        let nothing = ((0, 0, 0, [0; 4]), 0.0);
        Self { tasks, cluster, syncs: vec![nothing; syncs], pairs: Vec::new(), clock: PipelineSimulator::default() }
    }

    /// Returns the score of a plan. If its path reaches `limit_s`, returns [`PlanScore::IMPOSSIBLE`] as soon as that is
    /// known.
    pub(crate) fn score(&mut self, unscheduled: &mut UnscheduledPlan, limit_s: f64) -> PlanScore {
        let task = self.tasks[unscheduled.task];
        let (stages, micro) = (unscheduled.stages(), f64::from(task.micro_batches));
        if stages as u64 > u64::from(task.settings.max_stages) {
            return PlanScore::IMPOSSIBLE;
        }
        for stage in 0..stages {
            if unscheduled.costs[stage].is_none() {
                unscheduled.costs[stage] = self.stage_cost(unscheduled, stage);
                let Some(cost) = unscheduled.costs[stage] else { return PlanScore::IMPOSSIBLE };
                // The busy time of a single stage rejects many plans before any path is computed.
                if micro * (cost.forward_s + cost.backward_s) >= limit_s {
                    return PlanScore::IMPOSSIBLE;
                }
            }
        }
        let score = self.path(unscheduled, limit_s, true);
        if score.overflow == 0.0 {
            return score;
        }
        // Numbers in flight never grow along the stages, so a stage with many forces all in front of it to have as
        // many, which may not fit there. The smallest numbers may lack less memory.
        let min = self.path(unscheduled, limit_s, false);
        if min.overflow < score.overflow { min } else { score }
    }

    /// Returns the score of a plan whose stage costs are cached, with the largest numbers in flight if `is_eager`,
    /// otherwise with the smallest. A path of `limit_s` or more makes the plan impossible.
    fn path(&mut self, unscheduled: &mut UnscheduledPlan, limit_s: f64, is_eager: bool) -> PlanScore {
        let task = self.tasks[unscheduled.task];
        let stages = unscheduled.stages();
        let nothing = Suffix { paths: Paths::default(), max_in_flight: 1, overflow: 0.0 };
        if is_eager && !task.settings.overlap_p2p_comm {
            // Passes of the first cached stage contain the transfer from the stage before, whose devices may be others.
            unscheduled.suffixes.pop();
        }
        // Only paths with the largest numbers in flight are cached, since nearly all plans are scored with them.
        let known = if is_eager { unscheduled.suffixes.len() } else { 0 };
        let mut suffix = if known > 0 { unscheduled.suffixes[known - 1] } else { nothing };
        if suffix.paths.synced_s >= limit_s {
            return PlanScore::IMPOSSIBLE;
        }
        for (from_end, stage) in (known as u32 + 1..).zip((0..stages - known).rev()) {
            let Some(cost) = unscheduled.costs[stage] else { return PlanScore::IMPOSSIBLE };
            let (min, max) = task.settings.max_in_flights(from_end, task.micro_batches);
            // Numbers in flight never grow along the stages.
            let cost = cost.sharded(min);
            let min = min.max(suffix.max_in_flight);
            let cost = task.settled(cost, min);
            let bytes = |max_in_flight| cost.memory.bytes_with(max_in_flight);
            let fits = |max_in_flight| bytes(max_in_flight) <= cost.capacity_bytes;
            let max = if is_eager { max.max(min) } else { min };
            let max_in_flight = max_fitting_in_flight(min, max, fits).unwrap_or_else(|| {
                // A small shortfall gets a small penalty, so that annealing can pass through plans that do not fit.
                suffix.overflow += (bytes(min) - cost.capacity_bytes) / cost.capacity_bytes.max(1.0);
                min
            });
            let is_last = stage + 1 == stages;
            let rate = if is_last { Rate::default() } else { self.rate(unscheduled, stage) };
            let end = unscheduled.cuts[stage + 1] as usize;
            let busy_s = if is_last { 0.0 } else { task.cut_bytes[end] * rate.s_per_byte };
            let exposed_s = self.exposed_transfer_s(unscheduled, stage, busy_s);
            let shape = cost
                .path_stage((max_in_flight, max_in_flight), (busy_s, rate.latency_s))
                .with_exposed_transfers(exposed_s);
            suffix.paths = suffix.paths.extend(&shape, suffix.max_in_flight, task.micro_batches);
            suffix.max_in_flight = max_in_flight;
            if is_eager {
                unscheduled.suffixes.push(suffix);
            }
            if suffix.paths.synced_s >= limit_s {
                return PlanScore::IMPOSSIBLE; // further stages make no path shorter
            }
        }
        PlanScore { path_s: suffix.paths.synced_s, overflow: suffix.overflow }
    }

    /// Returns the simulated step of a plan that was scored and fits, with the largest numbers in flight that fit.
    ///
    /// For a model without tied weights it equals the step that [`crate::planner::hybrid::PlanEvaluator`] computes.
    pub(crate) fn step_s(&mut self, unscheduled: &UnscheduledPlan) -> Option<f64> {
        let task = self.tasks[unscheduled.task];
        let from_end = (1..=unscheduled.stages() as u32).rev();
        let min_in_flight = |from_end| task.settings.max_in_flights(from_end, task.micro_batches).0;
        let costs: Vec<BaseCost> = (unscheduled.costs.iter().flatten().zip(from_end))
            .map(|(cost, from_end)| task.settled(cost.sharded(min_in_flight(from_end)), min_in_flight(from_end)))
            .collect();
        let fits = costs.iter().map(|cost| |in_flight| cost.memory.bytes_with(in_flight) <= cost.capacity_bytes);
        let ranges = ranges(task.settings, task.micro_batches, fits)?;
        let max_in_flights =
            [u32::MAX, 0].into_iter().find_map(|wanted| nearest(&ranges, &vec![wanted; costs.len()]))?;
        let busy_s = |stage: usize| {
            let is_last = stage + 1 == unscheduled.stages();
            let rate = if is_last { Rate::default() } else { unscheduled.rates[stage].unwrap_or_default() };
            (task.cut_bytes[unscheduled.cuts[stage + 1] as usize] * rate.s_per_byte, rate)
        };
        let shapes = (0_usize..).zip(costs.iter().zip(max_in_flights)).map(|(stage, (cost, max_in_flight))| {
            let (send_s, rate) = busy_s(stage);
            let receive_s = stage.checked_sub(1).map_or(0.0, |front| busy_s(front).0);
            // The evaluator stores a transfer as one sum of busy time and latency. Subtracting from the same sum gives
            // the latency of its simulation to the last digit.
            cost.path_stage((max_in_flight, max_in_flight), (send_s, (send_s + rate.latency_s) - send_s))
                .with_exposed_transfers(task.settings.exposed_transfer_s(receive_s, send_s))
        });
        self.clock.step_s(shapes, task.micro_batches)
    }

    /// Returns the devices of a stage, from the cache if possible.
    pub(crate) fn devices_of(&self, unscheduled: &mut UnscheduledPlan, stage: usize) -> StageDevices {
        if let Some(devices_of) = unscheduled.stage_devices[stage] {
            return devices_of;
        }
        let devices = StageDevices::of(self.cluster, (0..).zip(unscheduled.row(stage).iter().copied()));
        *unscheduled.stage_devices[stage].insert(devices)
    }

    /// Returns the cost of a stage, or `None` if it has no devices or its split of the micro-batch is not allowed.
    fn stage_cost(&mut self, unscheduled: &mut UnscheduledPlan, stage: usize) -> Option<BaseCost> {
        let task = self.tasks[unscheduled.task];
        let devices = self.devices_of(unscheduled, stage);
        let totals_index = if devices.replicas == 0 { None } else { task.totals_index[devices.replicas as usize] }?;
        let cuts = (unscheduled.cuts[stage] as usize, unscheduled.cuts[stage + 1] as usize);
        let grad_reduce_s = self.grad_reduce_s(task, cuts, totals_index, devices.sync, devices.pace);
        let totals = &task.totals[totals_index as usize];
        let kept = BaseCost::new(task.model, totals, task.settings, &devices, cuts, grad_reduce_s);
        Some(if task.recompute == Recompute::Always { kept.recomputing() } else { kept })
    }

    /// Returns the exposed all-reduce time of a stage, from the cache if possible.
    fn grad_reduce_s(
        &mut self,
        task: &Subproblem<'_>,
        (begin, end): (usize, usize),
        totals_index: u32,
        rate: Rate,
        pace: Pace,
    ) -> f64 {
        if rate == Rate::default() {
            return 0.0;
        }
        let totals = &task.totals[totals_index as usize];
        let [speed, kinds] = pace.key();
        let key: SyncKey = (
            begin as u32,
            end as u32,
            task.samples[totals_index as usize],
            [rate.s_per_byte.to_bits(), rate.latency_s.to_bits(), speed, kinds],
        );
        // A direct-mapped cache: a collision overwrites the old entry. It needs no bookkeeping, and its size is fixed.
        let hash = rustc_hash::FxBuildHasher.hash_one(key) as usize;
        let at = (hash ^ (hash >> 32)) % self.syncs.len();
        let kept = &mut self.syncs[at];
        if kept.0 != key {
            let overlap = task.settings.overlap_sync;
            *kept = (key, cost::grad_reduce_s(task.model, totals, pace, (begin, end), rate, overlap));
        }
        kept.1
    }

    /// Returns the time of the transfers in each pass of a stage that sends for `send_s`.
    fn exposed_transfer_s(&mut self, unscheduled: &mut UnscheduledPlan, stage: usize, send_s: f64) -> f64 {
        let task = self.tasks[unscheduled.task];
        let receive_s = match stage.checked_sub(1) {
            Some(front) if !task.settings.overlap_p2p_comm => {
                task.cut_bytes[unscheduled.cuts[stage] as usize] * self.rate(unscheduled, front).s_per_byte
            }
            _ => 0.0,
        };
        task.settings.exposed_transfer_s(receive_s, send_s)
    }

    /// Returns the transfer rate between `stage` and the next one.
    pub(crate) fn rate(&mut self, unscheduled: &mut UnscheduledPlan, stage: usize) -> Rate {
        if let Some(rate) = unscheduled.rates[stage] {
            return rate;
        }
        self.pairs.clear();
        for (&from, &to) in unscheduled.row(stage).iter().zip(unscheduled.row(stage + 1)) {
            // Neighboring nodes often have equal counts. Grouping them keeps the list short on large clusters.
            match self.pairs.last_mut() {
                Some((senders, receivers, nodes)) if (*senders, *receivers) == (from, to) => *nodes += 1,
                _ => self.pairs.push((from, to, 1)),
            }
        }
        let rate = self.cluster.transfer(&self.pairs);
        unscheduled.rates[stage] = Some(rate);
        rate
    }
}
