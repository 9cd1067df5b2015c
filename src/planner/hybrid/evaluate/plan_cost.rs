//! Prices a whole plan: every stage's seconds and bytes, then the simulated step.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::cost::network::{Cluster, Machine, Rate};
use crate::cost::{self, Memory, Model, Totals};
use crate::error::{Error, Result};
use crate::planner::hybrid::bounds::paths::{PathStage, Paths};
use crate::planner::hybrid::evaluate::pipeline_simulator::Clock;
use crate::planner::hybrid::settings::Settings;
use crate::schedule::one_f_one_b;
use crate::simulate::{Costs, Links, StageTimes, Sweep, Transfer};

/// One stage of a plan: layers between two cuts on devices of some machines.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StageChoice {
    /// The cut below its first layer.
    pub begin: usize,
    /// The cut above its last layer.
    pub end: usize,
    /// `(machine, devices)`, ascending, none of them zero.
    pub footprint: Vec<(u32, u32)>,
    /// Forwards ahead of the first backward; the largest number of micro-batches in flight.
    pub window: u32,
}

impl StageChoice {
    /// Devices it takes.
    #[must_use]
    pub fn replicas(&self) -> u32 {
        self.footprint.iter().map(|&(_, count)| count).sum()
    }
}

/// Everything that a search decides.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Candidate {
    /// Samples that enter the pipeline at once.
    pub micro_batch: u32,
    /// Whether activations are recomputed.
    pub recompute: bool,
    /// First stage first.
    pub stages: Vec<StageChoice>,
}

impl Candidate {
    /// Device numbers of each stage: on every machine, earlier stages take lower numbers.
    #[must_use]
    pub fn devices(&self, cluster: &Cluster) -> Vec<Vec<u32>> {
        let mut next = Vec::with_capacity(cluster.machines.len());
        let mut devices = 0;
        for machine in &cluster.machines {
            next.push(devices);
            devices += machine.devices;
        }
        let mut take = |&(machine, count): &(u32, u32)| {
            let first = next[machine as usize];
            next[machine as usize] += count;
            first..first + count
        };
        self.stages.iter().map(|stage| stage.footprint.iter().flat_map(&mut take).collect()).collect()
    }

    /// Those of its stages.
    pub(crate) fn windows(&self) -> Vec<u32> {
        self.stages.iter().map(|stage| stage.window).collect()
    }

    /// The same stages with other windows.
    #[must_use]
    pub fn with_windows(mut self, windows: &[u32]) -> Self {
        self.stages.iter_mut().zip(windows).for_each(|(stage, &window)| stage.window = window);
        self
    }
}

/// What tells a machine from others.
fn kind(machine: &Machine) -> (u32, u64, u64) {
    (machine.devices, machine.memory_bytes.to_bits(), machine.speed.to_bits())
}

/// What a stage costs in a plan.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct StagePrice {
    /// Samples of a micro-batch on the replica that gets most.
    pub share: u32,
    /// Forward pass of one micro-batch.
    pub forward_s: f64,
    /// Backward pass of one micro-batch, with the forward pass that recomputation repeats.
    pub backward_s: f64,
    /// Its half for the gradients of inputs, without what recomputation repeats; `None` if no layer tells its halves.
    pub input_gradient_s: Option<f64>,
    /// Its half for the gradients of weights.
    pub weight_gradient_s: Option<f64>,
    /// Sending one micro-batch's output to the next stage, or its gradient back; 0 behind the last stage.
    pub transfer_s: f64,
    /// The part of `transfer_s` that occupies the fullest port.
    pub transfer_busy_s: f64,
    /// Gradient synchronisation of the whole stage.
    pub sync_s: f64,
    /// The part of it that outlasts the stage's last backward pass.
    pub sync_tail_s: f64,
    /// Held by each device.
    pub memory: Memory,
    /// Of its smallest device.
    pub capacity_bytes: f64,
}

/// A plan with its price.
#[derive(Debug, Clone, PartialEq)]
pub struct Priced {
    /// The simulated step.
    pub step_s: f64,
    /// The longest path through it that the search's model knows; never above `step_s`.
    pub path_s: f64,
    /// First stage first.
    pub stages: Vec<StagePrice>,
}

/// The devices of a stage, regardless of its layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StageDevices {
    pub replicas: u32,
    /// Speed of the slowest device.
    pub speed: f64,
    /// Memory of the smallest device.
    pub memory_bytes: f64,
    /// Gradient all-reduce over all of them.
    pub sync: Rate,
}

impl StageDevices {
    /// Summarizes counts of devices by machine. Machines without devices may be among them.
    pub(crate) fn of(cluster: &Cluster, counts: impl Iterator<Item = (u32, u32)>) -> Self {
        let (mut replicas, mut machines, mut widest) = (0, 0, 0);
        let (mut speed, mut memory_bytes) = (f64::INFINITY, f64::INFINITY);
        for (machine, count) in counts.filter(|&(_, count)| count > 0) {
            let machine = &cluster.machines[machine as usize];
            replicas += count;
            machines += 1;
            widest = widest.max(count);
            speed = speed.min(machine.speed);
            memory_bytes = memory_bytes.min(machine.memory_bytes);
        }
        Self { replicas, speed, memory_bytes, sync: cluster.all_reduce(machines, widest) }
    }
}

/// Cost of a stage that follows from its layers and its devices alone, with one micro-batch in flight.
///
/// Every plan gets its times and its memory here: the final ones through [`Pricer`], and the thousands that annealing
/// compares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BaseCost {
    pub forward_s: f64,
    pub backward_s: f64,
    /// Exposed gradient reduction.
    pub sync_s: f64,
    pub memory: Memory,
    pub capacity_bytes: f64,
}

impl BaseCost {
    /// Returns the cost of the layers between two cuts. `totals` are those of the share of each replica.
    pub(crate) fn new(
        model: &Model,
        totals: &Totals,
        settings: &Settings,
        devices: &StageDevices,
        cuts: (usize, usize),
        recompute: bool,
        sync_s: f64,
    ) -> Self {
        let forward_s = between(&totals.forward_s, cuts) / devices.speed;
        let backward_s = between(&totals.backward_s, cuts) / devices.speed + if recompute { forward_s } else { 0.0 };
        Self {
            forward_s,
            backward_s,
            sync_s,
            memory: cost::memory(model, totals, &settings.memory, cuts, devices.replicas, 1, recompute),
            capacity_bytes: devices.memory_bytes - settings.memory.reserved_bytes,
        }
    }

    /// Returns the stage as the paths and the simulator see it, with a range of windows and the transfer behind it.
    pub(crate) fn path_stage(&self, windows: (u32, u32), (busy_s, latency_s): (f64, f64)) -> PathStage {
        let Self { forward_s, backward_s, sync_s, .. } = *self;
        PathStage { forward_s, backward_s, sync_s, least_window: windows.0, window: windows.1, busy_s, latency_s }
    }
}

/// Returns the part of a sum that lies between two cuts. Sums below two cuts round differently, so layers that take next to
/// nothing could come out below zero.
fn between(below: &[f64], (begin, end): (usize, usize)) -> f64 {
    (below[end] - below[begin]).max(0.0)
}

/// What weights that a stage shares with others add to its price.
struct SharedPrice {
    /// Seconds of sums with others.
    tied_s: f64,
    /// Copies that another stage on the same devices holds already.
    held_once_bytes: f64,
    /// Layers and bytes of their weights that the stage doesn't sum alone.
    apart: Vec<(u32, f64)>,
}

/// Prices plans of one model on one cluster; keeps what it needs again.
pub struct Pricer<'a> {
    pub(crate) model: &'a Model,
    cluster: &'a Cluster,
    pub(crate) settings: &'a Settings,
    clock: Clock,
    /// By the number of samples.
    pub(crate) totals: rustc_hash::FxHashMap<u32, Totals>,
    /// How many plans were simulated.
    pub simulated: u64,
    /// How many actions they had.
    pub actions: u64,
}

impl<'a> Pricer<'a> {
    /// A pricer that has seen nothing yet.
    #[must_use]
    pub fn new(model: &'a Model, cluster: &'a Cluster, settings: &'a Settings) -> Self {
        Self {
            model,
            cluster,
            settings,
            clock: Clock::default(),
            totals: rustc_hash::FxHashMap::default(),
            simulated: 0,
            actions: 0,
        }
    }

    /// Seconds and bytes of every stage.
    ///
    /// # Errors
    /// [`Error::Argument`] if the replicas of a stage can't share the micro-batch.
    pub fn stages(&mut self, plan: &Candidate) -> Result<Vec<StagePrice>> {
        self.stages_of(plan, None)
    }

    /// The same where stages share devices: which group of them each is on. Stages of a group hold a weight that they
    /// share once; all else is as if each had devices of its own.
    ///
    /// # Errors
    /// As [`Pricer::stages`].
    pub fn stages_of(&mut self, plan: &Candidate, group_of: Option<&[u32]>) -> Result<Vec<StagePrice>> {
        let shared = self.shared(plan, group_of);
        if self.settings.equal_replicas && plan.stages.windows(2).any(|two| two[0].replicas() != two[1].replicas()) {
            return Err(Error::argument("stages differ in their numbers of replicas", "give each stage as many"));
        }
        (0..plan.stages.len()).map(|index| self.stage(plan, index, shared.get(index))).collect()
    }

    /// The same for a plan of the stages of another one, but for some: what others cost is known.
    ///
    /// # Errors
    /// As [`Pricer::stages`].
    pub(crate) fn stages_but(
        &mut self,
        plan: &Candidate,
        known: (&Candidate, &[StagePrice]),
    ) -> Result<Vec<StagePrice>> {
        let (other, prices) = known;
        let is_alike = (plan.stages.len(), plan.micro_batch, plan.recompute)
            == (other.stages.len(), other.micro_batch, other.recompute);
        if !is_alike || self.settings.equal_replicas || self.shares_weights() {
            return self.stages(plan);
        }
        (0..plan.stages.len())
            .map(|index| {
                let [next, other_next] =
                    [plan, other].map(|plan| plan.stages.get(index + 1).map(|next| &next.footprint));
                let is_known = plan.stages[index] == other.stages[index] && next == other_next;
                if is_known { Ok(prices[index].clone()) } else { self.stage(plan, index, None) }
            })
            .collect()
    }

    /// Seconds and bytes of one stage.
    fn stage(&mut self, plan: &Candidate, index: usize, shared: Option<&SharedPrice>) -> Result<StagePrice> {
        let (micro_batch, stage) = (plan.micro_batch, &plan.stages[index]);
        let replicas = stage.replicas();
        let Some(share) = self.settings.share(micro_batch, replicas) else {
            return Err(Error::argument(
                format!("stage {index} cannot split a micro-batch of {micro_batch} over {replicas} replicas"),
                format!(
                    "each replica needs at least {} samples{}",
                    self.settings.smallest_share,
                    if self.settings.uneven_shares { "" } else { ", all the same number" }
                ),
            ));
        };
        let (model, settings) = (self.model, self.settings);
        for samples in [share, micro_batch] {
            self.totals.entry(samples).or_insert_with(|| model.totals(samples));
        }
        let totals = &self.totals[&share];
        let devices = StageDevices::of(self.cluster, stage.footprint.iter().copied());
        let cuts = (stage.begin, stage.end);
        let rate = match plan.stages.get(index + 1) {
            Some(next) => transfer(self.cluster, &stage.footprint, &next.footprint),
            None => Rate::default(),
        };
        let cut_bytes =
            if index + 1 < plan.stages.len() { self.totals[&micro_batch].boundary_bytes[stage.end] } else { 0.0 };
        let apart = shared.map_or(&[][..], |shared| &shared.apart);
        let tied_s = shared.map_or(0.0, |shared| shared.tied_s);
        let sync_tail =
            |overlap| cost::sync_without_s(model, totals, devices.speed, cuts, devices.sync, overlap, apart) + tied_s;
        let sync_tail_s = sync_tail(settings.overlap_sync);
        let alone = BaseCost::new(model, totals, settings, &devices, cuts, plan.recompute, sync_tail_s);
        let half_s = |below: &[f64]| between(below, cuts) / devices.speed;
        let memory = alone.memory.with_in_flight(stage.window);
        let held_once_bytes = shared.map_or(0.0, |shared| shared.held_once_bytes);
        Ok(StagePrice {
            share,
            forward_s: alone.forward_s,
            backward_s: alone.backward_s,
            input_gradient_s: totals.halves.as_ref().map(|halves| half_s(&halves.input_gradient_s)),
            weight_gradient_s: totals.halves.as_ref().map(|halves| half_s(&halves.weight_gradient_s)),
            transfer_s: cut_bytes * rate.s_per_byte + rate.latency_s,
            transfer_busy_s: cut_bytes * rate.s_per_byte,
            sync_s: sync_tail(false),
            sync_tail_s,
            memory: if held_once_bytes > 0.0 {
                memory.with_weights(-held_once_bytes, &settings.memory, replicas)
            } else {
                memory
            },
            capacity_bytes: alone.capacity_bytes,
        })
    }

    /// For each stage what weights that it shares with others add; nothing where no layers share any.
    fn shared(&self, plan: &Candidate, group_of: Option<&[u32]>) -> Vec<SharedPrice> {
        if self.model.ties.is_empty() {
            return Vec::new();
        }
        let own: Vec<u32> = (0..plan.stages.len() as u32).collect();
        let group_of = group_of.unwrap_or(&own);
        let cuts: Vec<(usize, usize)> = plan.stages.iter().map(|stage| (stage.begin, stage.end)).collect();
        (cost::shared(self.model, &cuts, group_of).into_iter().zip(&cuts))
            .map(|(shared, &cuts)| SharedPrice {
                tied_s: (shared.sums.iter())
                    .map(|(bytes, groups)| {
                        let rate = self.all_reduce(plan, group_of, groups);
                        bytes * rate.s_per_byte + rate.latency_s
                    })
                    .sum(),
                held_once_bytes: cost::ties::copied_bytes(self.model, cuts) - shared.copied_bytes,
                apart: shared.apart,
            })
            .collect()
    }

    /// The rate at which all devices of some groups sum.
    fn all_reduce(&self, plan: &Candidate, group_of: &[u32], groups: &[u32]) -> Rate {
        let mut on_machine: std::collections::BTreeMap<u32, u32> = std::collections::BTreeMap::new();
        for group in groups {
            let first = group_of.iter().position(|other| other == group);
            for &(machine, count) in first.iter().flat_map(|&first| &plan.stages[first].footprint) {
                *on_machine.entry(machine).or_default() += count;
            }
        }
        self.cluster.all_reduce(on_machine.len() as u32, on_machine.into_values().max().unwrap_or(1))
    }

    /// Prices and simulates a plan, whether or not it fits the devices' memory.
    ///
    /// # Errors
    /// As [`Pricer::stages`]; [`Error::Schedule`] if windows grow along the stages, so that they wait for each other.
    pub fn price(&mut self, plan: &Candidate) -> Result<Priced> {
        let (stages, windows) = (self.stages(plan)?, plan.windows());
        let step_s = self.step_s(&stages, &windows, plan.micro_batch)?;
        Ok(Priced { step_s, path_s: self.path_s(&stages, &windows, plan.micro_batch), stages })
    }

    /// Simulates priced stages with these windows, in micro-batches of so many samples.
    ///
    /// # Errors
    /// [`Error::Schedule`] if windows grow along the stages.
    pub(crate) fn step_s(&mut self, stages: &[StagePrice], windows: &[u32], micro_batch: u32) -> Result<f64> {
        let micro_batches = self.settings.global_batch / micro_batch;
        self.simulated += 1;
        self.actions += 2 * u64::from(micro_batches) * windows.len() as u64;
        let shapes = stages.iter().zip(windows).map(|(stage, &window)| path_stage(stage, (window, window)));
        if let Some(step_s) = self.clock.step_s(shapes.clone(), micro_batches) {
            return Ok(step_s);
        }
        let messages: Vec<Transfer> =
            shapes.map(|shape| Transfer { busy_s: shape.busy_s, latency_s: shape.latency_s }).collect();
        let costs = Costs {
            compute: stages.iter().map(|stage| StageTimes::new(stage.forward_s, stage.backward_s)).collect(),
            activation: messages.clone(),
            gradient: messages,
            gradient_sync_s: stages.iter().map(|stage| stage.sync_tail_s).collect(),
            optimizer_s: vec![0.0; stages.len()],
        };
        Sweep::default().step_s(&one_f_one_b(windows, micro_batches), &costs, Links::Queued)
    }

    /// The longest path through priced stages with these windows: their step without simulation, or a little less.
    pub(crate) fn path_s(&self, stages: &[StagePrice], windows: &[u32], micro_batch: u32) -> f64 {
        self.longest_path_s(stages, windows.iter().map(|&window| (window, window)), micro_batch)
    }

    /// The longest path that there is through priced stages for all windows between a least and a most.
    pub(crate) fn longest_path_s(
        &self,
        stages: &[StagePrice],
        windows: impl DoubleEndedIterator<Item = (u32, u32)> + ExactSizeIterator,
        micro_batch: u32,
    ) -> f64 {
        let mut paths = Paths::default();
        let mut next_window = 1;
        for (stage, windows) in stages.iter().zip(windows).rev() {
            paths = paths.extend(&path_stage(stage, windows), next_window, self.settings.global_batch / micro_batch);
            next_window = windows.0;
        }
        paths.synced_s
    }

    /// For each machine the first one of its kind on which every stage of a plan has as many devices.
    pub(crate) fn alike(&self, plan: &Candidate) -> Vec<u32> {
        let mut first = rustc_hash::FxHashMap::default();
        (0..)
            .zip(self.cluster.machines.iter().zip(self.held(plan)))
            .map(|(number, (machine, held))| *first.entry((kind(machine), held)).or_insert(number))
            .collect()
    }

    /// The same plan with machines that differ in nothing in the order of the stages that they take part in.
    pub(crate) fn in_order(&self, plan: &Candidate) -> Candidate {
        let (machines, held) = (&self.cluster.machines, self.held(plan));
        // Those of the first stage first, and of them those that give it most; idle ones last.
        let begins = |machine: &usize| -> Vec<(usize, Reverse<u32>)> {
            let stages = held[*machine].iter().map(|&(stage, count)| (stage, Reverse(count)));
            stages.chain([(usize::MAX, Reverse(0))]).collect()
        };
        let mut of_kind: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (number, machine) in machines.iter().enumerate() {
            of_kind.entry(kind(machine)).or_default().push(number);
        }
        let mut renamed = vec![0; machines.len()];
        for numbers in of_kind.values() {
            let mut sorted = numbers.clone();
            sorted.sort_by_cached_key(begins);
            sorted.into_iter().zip(numbers).for_each(|(old, &new)| renamed[old] = new as u32);
        }
        let mut plan = plan.clone();
        for stage in &mut plan.stages {
            stage.footprint.iter_mut().for_each(|(machine, _)| *machine = renamed[*machine as usize]);
            stage.footprint.sort_unstable();
        }
        plan
    }

    /// Stages of a plan on each machine, with their devices there.
    fn held(&self, plan: &Candidate) -> Vec<Vec<(usize, u32)>> {
        let mut held = vec![Vec::new(); self.cluster.machines.len()];
        for (index, stage) in plan.stages.iter().enumerate() {
            for &(machine, count) in &stage.footprint {
                held[machine as usize].push((index, count));
            }
        }
        held
    }

    /// Whether layers of the model share weights.
    #[must_use]
    pub fn shares_weights(&self) -> bool {
        !self.model.ties.is_empty()
    }

    /// Whether every device of a priced plan holds what it must.
    #[must_use]
    pub fn fits(stages: &[StagePrice]) -> bool {
        stages.iter().all(|stage| stage.memory.total_bytes() <= stage.capacity_bytes)
    }
}

/// A priced stage as the paths see it, with the least and the most window that it may have.
pub(crate) fn path_stage(stage: &StagePrice, (least_window, window): (u32, u32)) -> PathStage {
    PathStage {
        forward_s: stage.forward_s,
        backward_s: stage.backward_s,
        sync_s: stage.sync_tail_s,
        least_window,
        window,
        busy_s: stage.transfer_busy_s,
        latency_s: stage.transfer_s - stage.transfer_busy_s,
    }
}

/// The rate between the devices of two neighbouring stages.
fn transfer(cluster: &Cluster, from: &[(u32, u32)], to: &[(u32, u32)]) -> Rate {
    let mut pairs = Vec::with_capacity(from.len() + to.len());
    let mut to = to.iter().copied().peekable();
    for &(machine, senders) in from {
        while let Some((_, receivers)) = to.next_if(|&(other, _)| other < machine) {
            pairs.push((0, receivers, 1));
        }
        pairs.push((senders, to.next_if(|&(other, _)| other == machine).map_or(0, |(_, receivers)| receivers), 1));
    }
    pairs.extend(to.map(|(_, receivers)| (0, receivers, 1)));
    cluster.transfer(&pairs)
}
