//! Plans that annealing changes by the thousand: complete plans on any placement, scored by their longest path alone.
//!
//! An [`UnscheduledPlan`] counts devices by stage and node in one table, so a change touches few numbers and allocates nothing.
//! The cost of a stage is kept until the stage changes, and its transfer until a neighbor does. The paths of the stages behind
//! the last change are kept, too.

use std::hash::BuildHasher;

use crate::cost;
use crate::cost::network::{Cluster, Rate};
use crate::planner::hybrid::{
    bounds::paths::Paths,
    evaluate::{
        candidate_plan::{CandidatePlan, StageCandidate},
        in_flight_ranges::{nearest, ranges},
        pipeline_simulator::PipelineSimulator,
        stage_cost::{BaseCost, StageDevices},
    },
    settings::largest_max_in_flight,
    subproblem::Subproblem,
};

/// A complete plan without numbers in flight, which are as large as memory allows.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct UnscheduledPlan {
    /// Index of its micro-batch size.
    pub task: usize,
    /// Cuts between stages, the empty and the full one included.
    pub cuts: Vec<u32>,
    /// Devices of each stage on each machine, stage by stage.
    pub counts: Vec<u32>,
    /// Devices of each machine in no stage.
    pub free: Vec<u32>,
    /// Devices of each stage, where they are known.
    footings: Vec<Option<StageDevices>>,
    /// Cost of each stage, where it is known.
    costs: Vec<Option<BaseCost>>,
    /// Rate of the transfer to the next stage, where it is known.
    rates: Vec<Option<Rate>>,
    /// Paths of its last stages that have not changed, with the largest numbers in flight. The last stage comes first.
    suffixes: Vec<Suffix>,
}

/// Paths of a stage and those behind it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Suffix {
    paths: Paths,
    /// Micro-batches in flight of its first stage.
    max_in_flight: u32,
    /// Memory that it lacks, as a share of the capacity, summed over stages.
    overflow: f64,
}

/// Score of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PlanScore {
    /// Longest path, as if all stages fitted.
    pub path_s: f64,
    /// Memory that stages lack, as a share of the capacity, summed. 0 if all fit.
    pub overflow: f64,
}

impl PlanScore {
    /// Score of an invalid plan.
    pub(crate) const IMPOSSIBLE: Self = Self { path_s: f64::INFINITY, overflow: 0.0 };
}

impl UnscheduledPlan {
    pub(crate) fn stages(&self) -> usize {
        self.cuts.len() - 1
    }

    fn machines(&self) -> usize {
        self.free.len()
    }

    /// Returns the devices of a stage on each node.
    pub(crate) fn row(&self, stage: usize) -> &[u32] {
        let machines = self.machines();
        &self.counts[stage * machines..(stage + 1) * machines]
    }

    /// Returns a plan with these counts of devices, by stage and node.
    pub(crate) fn new(cluster: &Cluster, task: usize, cuts: Vec<u32>, counts: Vec<u32>) -> Self {
        let stages = cuts.len() - 1;
        let mut free: Vec<u32> = cluster.machines.iter().map(|machine| machine.devices).collect();
        for row in counts.chunks(free.len()) {
            free.iter_mut().zip(row).for_each(|(free, taken)| *free -= taken);
        }
        let (footings, costs, rates) = (vec![None; stages], vec![None; stages], vec![None; stages]);
        Self { task, cuts, counts, free, footings, costs, rates, suffixes: Vec::new() }
    }

    /// Drops the counts of devices. What is known of stages and links is enough to score the plan with other cuts.
    pub(crate) fn without_devices(self) -> Self {
        Self { counts: Vec::new(), free: Vec::new(), ..self }
    }

    pub(crate) fn of(cluster: &Cluster, task: usize, plan: &CandidatePlan) -> Self {
        let machines = cluster.machines.len();
        let mut counts = vec![0; plan.stages.len() * machines];
        for (row, stage) in counts.chunks_mut(machines).zip(&plan.stages) {
            stage.footprint.iter().for_each(|&(machine, count)| row[machine as usize] = count);
        }
        let cuts = std::iter::once(0).chain(plan.stages.iter().map(|stage| stage.end as u32)).collect();
        Self::new(cluster, task, cuts, counts)
    }

    /// Returns the plan with one micro-batch in flight in each stage.
    pub(crate) fn candidate(&self, task: &Subproblem<'_>) -> CandidatePlan {
        let stages = (0..self.stages())
            .map(|stage| StageCandidate {
                begin: self.cuts[stage] as usize,
                end: self.cuts[stage + 1] as usize,
                footprint: (0..).zip(self.row(stage)).filter(|(_, count)| **count > 0).map(|(m, c)| (m, *c)).collect(),
                max_in_flight: 1,
            })
            .collect();
        CandidatePlan { micro_batch: task.micro_batch, recompute: task.recompute, stages }
    }

    /// Copies `other` without allocating.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.task = other.task;
        self.cuts.clone_from(&other.cuts);
        self.counts.clone_from(&other.counts);
        self.free.clone_from(&other.free);
        self.footings.clone_from(&other.footings);
        self.costs.clone_from(&other.costs);
        self.rates.clone_from(&other.rates);
        self.suffixes.clone_from(&other.suffixes);
    }

    /// Copies the cuts of `other`, which has the same devices, without allocating.
    pub(crate) fn copy_cuts_from(&mut self, other: &Self) {
        self.cuts.clone_from(&other.cuts);
        self.costs.clone_from(&other.costs);
        self.suffixes.clone_from(&other.suffixes);
    }

    /// Drops the paths of all suffixes that contain a stage.
    fn touched(&mut self, stage: usize) {
        self.suffixes.truncate(self.stages() - 1 - stage);
    }

    /// Drops what was known of a stage whose devices change.
    pub(crate) fn moved(&mut self, stage: usize) {
        self.touched(stage);
        self.footings[stage] = None;
        self.costs[stage] = None;
        self.rates[stage] = None;
        if stage > 0 {
            self.rates[stage - 1] = None;
        }
    }

    /// Moves the cut in front of a stage, which is not the first one.
    pub(crate) fn cut_at(&mut self, stage: usize, cut: u32) {
        self.touched(stage);
        self.cuts[stage] = cut;
        self.costs[stage] = None;
        self.costs[stage - 1] = None;
    }

    /// Changes the micro-batch size.
    pub(crate) fn become_of(&mut self, task: usize) {
        self.task = task;
        self.costs.fill(None);
        self.suffixes.clear();
    }

    /// Changes the micro-batch size and the cuts.
    pub(crate) fn recut(&mut self, task: usize, cuts: Vec<u32>) {
        self.cuts = cuts;
        self.become_of(task);
    }

    /// Returns the number of pairs of a stage and a node that it has devices on.
    pub(crate) fn parts(&self) -> u64 {
        self.counts.iter().filter(|&&count| count > 0).count() as u64
    }

    /// Moves devices of a node from one stage to another. `None` stands for free devices.
    pub(crate) fn hand(&mut self, machine: usize, count: u32, from: Option<usize>, to: Option<usize>) {
        let machines = self.machines();
        for (owner, is_giver) in [(from, true), (to, false)] {
            let held = match owner {
                Some(stage) => {
                    self.moved(stage);
                    &mut self.counts[stage * machines + machine]
                }
                None => &mut self.free[machine],
            };
            *held = if is_giver { *held - count } else { *held + count };
        }
    }

    /// Swaps all devices of two stages.
    pub(crate) fn exchange(&mut self, one: usize, other: usize) {
        let machines = self.machines();
        for machine in 0..machines {
            self.counts.swap(one * machines + machine, other * machines + machine);
        }
        self.moved(one);
        self.moved(other);
    }

    /// Splits a stage in two. The second one has no devices yet.
    pub(crate) fn split(&mut self, stage: usize, cut: u32) {
        self.touched(stage);
        let at = (stage + 1) * self.machines();
        self.cuts.insert(stage + 1, cut);
        self.counts.splice(at..at, std::iter::repeat_n(0, self.free.len()));
        self.footings.insert(stage + 1, None);
        self.costs.insert(stage + 1, None);
        self.rates.insert(stage + 1, None);
        self.moved(stage);
    }

    /// Joins a stage and the next, with all their devices.
    pub(crate) fn merge(&mut self, stage: usize) {
        self.touched(stage + 1);
        let machines = self.machines();
        for machine in 0..machines {
            self.counts[stage * machines + machine] += self.counts[(stage + 1) * machines + machine];
        }
        self.counts.drain((stage + 1) * machines..(stage + 2) * machines);
        self.cuts.remove(stage + 1);
        self.footings.remove(stage + 1);
        self.costs.remove(stage + 1);
        self.rates.remove(stage + 1);
        self.moved(stage);
    }
}

/// Cuts of a stage, share, rate and speed.
type SyncKey = (u32, u32, u32, [u64; 3]);

/// Scores and simulates plans, and keeps all-reduce times.
pub(crate) struct PlanScorer<'a> {
    pub tasks: &'a [&'a Subproblem<'a>],
    pub cluster: &'a Cluster,
    syncs: Vec<(SyncKey, f64)>,
    pairs: Vec<(u32, u32, u32)>,
    clock: PipelineSimulator,
}

impl<'a> PlanScorer<'a> {
    /// Returns a scorer that keeps this number of all-reduce times.
    pub(crate) fn new(tasks: &'a [&'a Subproblem<'a>], cluster: &'a Cluster, syncs: usize) -> Self {
        let nothing = ((0, 0, 0, [0; 3]), 0.0);
        Self { tasks, cluster, syncs: vec![nothing; syncs], pairs: Vec::new(), clock: PipelineSimulator::default() }
    }

    /// Returns the score of a plan. A path of `limit_s` or more counts as invalid.
    pub(crate) fn judge(&mut self, sketch: &mut UnscheduledPlan, limit_s: f64) -> PlanScore {
        let task = self.tasks[sketch.task];
        let (stages, micro) = (sketch.stages(), f64::from(task.micro_batches));
        if stages as u64 > u64::from(task.settings.max_stages) {
            return PlanScore::IMPOSSIBLE;
        }
        for stage in 0..stages {
            if sketch.costs[stage].is_none() {
                sketch.costs[stage] = self.stage_cost(sketch, stage);
                let Some(cost) = sketch.costs[stage] else { return PlanScore::IMPOSSIBLE };
                if micro * (cost.forward_s + cost.backward_s) >= limit_s {
                    return PlanScore::IMPOSSIBLE;
                }
            }
        }
        let judged = self.path(sketch, limit_s, true);
        if judged.overflow == 0.0 {
            return judged;
        }
        // A stage that runs ahead makes all before it do so, and they may lack the memory.
        let least = self.path(sketch, limit_s, false);
        if least.overflow < judged.overflow { least } else { judged }
    }

    /// Returns the score of a plan whose stage costs are known, with the largest numbers in flight if `is_eager`,
    /// otherwise with the smallest. A path of `limit_s` or more counts as invalid.
    fn path(&mut self, sketch: &mut UnscheduledPlan, limit_s: f64, is_eager: bool) -> PlanScore {
        let task = self.tasks[sketch.task];
        let stages = sketch.stages();
        let nothing = Suffix { paths: Paths::default(), max_in_flight: 1, overflow: 0.0 };
        let known = if is_eager { sketch.suffixes.len() } else { 0 };
        let mut suffix = if known > 0 { sketch.suffixes[known - 1] } else { nothing };
        if suffix.paths.synced_s >= limit_s {
            return PlanScore::IMPOSSIBLE;
        }
        for (from_end, stage) in (known as u32 + 1..).zip((0..stages - known).rev()) {
            let Some(cost) = sketch.costs[stage] else { return PlanScore::IMPOSSIBLE };
            let bytes = |max_in_flight| cost.memory.bytes_with(max_in_flight);
            let (least, most) = task.settings.max_in_flights(from_end, task.micro_batches);
            let least = least.max(suffix.max_in_flight);
            let fits = |max_in_flight| bytes(max_in_flight) <= cost.capacity_bytes;
            let most = if is_eager { most.max(least) } else { least };
            let max_in_flight = largest_max_in_flight(least, most, fits).unwrap_or_else(|| {
                suffix.overflow += (bytes(least) - cost.capacity_bytes) / cost.capacity_bytes.max(1.0);
                least
            });
            let is_last = stage + 1 == stages;
            let rate = if is_last { Rate::default() } else { self.rate(sketch, stage) };
            let end = sketch.cuts[stage + 1] as usize;
            let busy_s = if is_last { 0.0 } else { task.cut_bytes[end] * rate.s_per_byte };
            let shape = cost.path_stage((max_in_flight, max_in_flight), (busy_s, rate.latency_s));
            suffix.paths = suffix.paths.extend(&shape, suffix.max_in_flight, task.micro_batches);
            suffix.max_in_flight = max_in_flight;
            if is_eager {
                sketch.suffixes.push(suffix);
            }
            if suffix.paths.synced_s >= limit_s {
                return PlanScore::IMPOSSIBLE; // more stages make no path shorter
            }
        }
        PlanScore { path_s: suffix.paths.synced_s, overflow: suffix.overflow }
    }

    /// Returns the simulated step of a plan that was scored and fits, with the largest numbers in flight. It is that of
    /// the evaluator, for a model without tied weights.
    pub(crate) fn step_s(&mut self, sketch: &UnscheduledPlan) -> Option<f64> {
        let task = self.tasks[sketch.task];
        let costs: Vec<&BaseCost> = sketch.costs.iter().flatten().collect();
        let held = costs.iter().map(|cost| (&cost.memory, cost.capacity_bytes));
        let ranges = ranges(task.settings, task.micro_batches, held)?;
        let max_in_flights =
            [u32::MAX, 0].into_iter().find_map(|wanted| nearest(&ranges, &vec![wanted; costs.len()]))?;
        let shapes = (0_usize..).zip(costs.iter().zip(max_in_flights)).map(|(stage, (cost, max_in_flight))| {
            let is_last = stage + 1 == sketch.stages();
            let rate = if is_last { Rate::default() } else { sketch.rates[stage].unwrap_or_default() };
            let busy_s = task.cut_bytes[sketch.cuts[stage + 1] as usize] * rate.s_per_byte;
            // Plans keep the transfer as one number, so this is the latency that its simulation has, to the last digit.
            cost.path_stage((max_in_flight, max_in_flight), (busy_s, (busy_s + rate.latency_s) - busy_s))
        });
        self.clock.step_s(shapes, task.micro_batches)
    }

    /// Returns the devices of a stage.
    pub(crate) fn footing(&self, sketch: &mut UnscheduledPlan, stage: usize) -> StageDevices {
        if let Some(footing) = sketch.footings[stage] {
            return footing;
        }
        let devices = StageDevices::of(self.cluster, (0..).zip(sketch.row(stage).iter().copied()));
        *sketch.footings[stage].insert(devices)
    }

    fn stage_cost(&mut self, sketch: &mut UnscheduledPlan, stage: usize) -> Option<BaseCost> {
        let task = self.tasks[sketch.task];
        let devices = self.footing(sketch, stage);
        let share = if devices.replicas == 0 { None } else { task.share[devices.replicas as usize] }?;
        let cuts = (sketch.cuts[stage] as usize, sketch.cuts[stage + 1] as usize);
        let grad_reduce_s = self.grad_reduce_s(task, cuts, share, devices.sync, devices.speed);
        let totals = &task.totals[share as usize];
        Some(BaseCost::new(task.model, totals, task.settings, &devices, cuts, task.recompute, grad_reduce_s))
    }

    fn grad_reduce_s(
        &mut self,
        task: &Subproblem<'_>,
        (begin, end): (usize, usize),
        share: u32,
        rate: Rate,
        speed: f64,
    ) -> f64 {
        if rate == Rate::default() {
            return 0.0;
        }
        let totals = &task.totals[share as usize];
        let key: SyncKey = (
            begin as u32,
            end as u32,
            task.samples[share as usize],
            [rate.s_per_byte.to_bits(), rate.latency_s.to_bits(), speed.to_bits()],
        );
        let hash = rustc_hash::FxBuildHasher.hash_one(key) as usize;
        let at = (hash ^ (hash >> 32)) % self.syncs.len();
        let kept = &mut self.syncs[at];
        if kept.0 != key {
            let overlap = task.settings.overlap_sync;
            *kept = (key, cost::grad_reduce_s(task.model, totals, speed, (begin, end), rate, overlap));
        }
        kept.1
    }

    /// Returns the transfer rate between a stage and the next one.
    pub(crate) fn rate(&mut self, sketch: &mut UnscheduledPlan, stage: usize) -> Rate {
        if let Some(rate) = sketch.rates[stage] {
            return rate;
        }
        self.pairs.clear();
        for (&from, &to) in sketch.row(stage).iter().zip(sketch.row(stage + 1)) {
            match self.pairs.last_mut() {
                Some((senders, receivers, machines)) if (*senders, *receivers) == (from, to) => *machines += 1,
                _ => self.pairs.push((from, to, 1)),
            }
        }
        let rate = self.cluster.transfer(&self.pairs);
        sketch.rates[stage] = Some(rate);
        rate
    }
}
