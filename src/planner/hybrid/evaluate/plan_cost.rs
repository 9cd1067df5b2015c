//! Cost of a plan: of every stage, of the weights that stages share, and the simulated step.
//!
//! Lemma *Weights that stages share* (docs/proofs.md#weights-that-stages-share): the search ignores tied weights where it adds
//! up times, and no plan costs less than it assumes. Their all-reduces are added here.

use super::candidate_plan::CandidatePlan;
use super::stage_cost::{BaseCost, StageCost, StageDevices, between, path_stage, transfer};
use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::cost::network::{Cluster, Machine, Rate};
use crate::cost::{self, LayerSums, Totals};
use crate::error::{Error, Result};
use crate::planner::hybrid::{
    bounds::paths::Paths, evaluate::pipeline_simulator::PipelineSimulator, settings::Settings,
};
use crate::schedule::one_f_one_b;
use crate::simulate::{Costs, Links, StageTimes, Sweep, Transfer};

/// Returns what distinguishes a node from others.
fn kind(machine: &Machine) -> (u32, u64, u64) {
    (machine.devices, machine.memory_bytes.to_bits(), machine.speed.to_bits())
}

/// The costs of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluatedPlan {
    /// Simulated step.
    pub step_s: f64,
    /// Longest path of the plan. It is at most `step_s`.
    pub path_s: f64,
    /// Costs of the stages, the first one first.
    pub stages: Vec<StageCost>,
}

/// What tied weights add to the cost of a stage.
struct TiedWeightCost {
    /// All-reduces over the devices of several stages.
    tied_s: f64,
    /// Bytes of copies that another stage on the same devices holds already.
    held_once_bytes: f64,
    /// Layers, with the bytes of their weights that the stage does not sum by itself.
    apart: Vec<(u32, f64)>,
}

/// Evaluates plans of one model on one cluster, and keeps the sums of each share of a micro-batch.
pub struct PlanEvaluator<'a> {
    pub(crate) model: &'a LayerSums,
    cluster: &'a Cluster,
    pub(crate) settings: &'a Settings,
    clock: PipelineSimulator,
    /// Layer sums by the number of samples.
    pub(crate) totals: rustc_hash::FxHashMap<u32, Totals>,
    /// Plans that were simulated.
    pub simulated: u64,
    /// Actions of these plans.
    pub actions: u64,
}

impl<'a> PlanEvaluator<'a> {
    /// Returns an evaluator without any sums yet.
    #[must_use]
    pub fn new(model: &'a LayerSums, cluster: &'a Cluster, settings: &'a Settings) -> Self {
        Self {
            model,
            cluster,
            settings,
            clock: PipelineSimulator::default(),
            totals: rustc_hash::FxHashMap::default(),
            simulated: 0,
            actions: 0,
        }
    }

    /// Returns the cost of every stage.
    ///
    /// # Errors
    /// [`Error::Argument`] if the replicas of a stage can't share the micro-batch.
    pub fn stages(&mut self, plan: &CandidatePlan) -> Result<Vec<StageCost>> {
        self.stages_of(plan, None)
    }

    /// Returns the cost of every stage where stages share devices. `group_of` says which group of devices each one is
    /// on. Stages of a group hold a tied weight once. All else is as if each stage had separate devices.
    ///
    /// # Errors
    /// As [`PlanEvaluator::stages`].
    pub fn stages_of(&mut self, plan: &CandidatePlan, group_of: Option<&[u32]>) -> Result<Vec<StageCost>> {
        let shared = self.shared(plan, group_of);
        if self.settings.equal_replicas && plan.stages.windows(2).any(|two| two[0].replicas() != two[1].replicas()) {
            return Err(Error::argument("stages differ in their numbers of replicas", "give each stage as many"));
        }
        (0..plan.stages.len()).map(|index| self.stage(plan, index, shared.get(index))).collect()
    }

    /// Returns the cost of every stage of a plan that differs from the plan `known` in a few stages. Equal stages keep
    /// their known cost.
    ///
    /// # Errors
    /// As [`PlanEvaluator::stages`].
    pub(crate) fn stages_but(
        &mut self,
        plan: &CandidatePlan,
        known: (&CandidatePlan, &[StageCost]),
    ) -> Result<Vec<StageCost>> {
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

    /// Returns the cost of one stage.
    fn stage(&mut self, plan: &CandidatePlan, index: usize, shared: Option<&TiedWeightCost>) -> Result<StageCost> {
        let (micro_batch, stage) = (plan.micro_batch, &plan.stages[index]);
        let replicas = stage.replicas();
        let Some(share) = self.settings.share(micro_batch, replicas) else {
            return Err(Error::argument(
                format!("stage {index} cannot split a micro-batch of {micro_batch} over {replicas} replicas"),
                format!(
                    "each replica needs at least {} samples{}",
                    self.settings.min_samples_per_replica,
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
        let exposed_grad_reduce_s = sync_tail(settings.overlap_sync);
        let alone = BaseCost::new(model, totals, settings, &devices, cuts, plan.recompute, exposed_grad_reduce_s);
        let half_s = |below: &[f64]| between(below, cuts) / devices.speed;
        let memory = alone.memory.with_in_flight(stage.max_in_flight);
        let held_once_bytes = shared.map_or(0.0, |shared| shared.held_once_bytes);
        Ok(StageCost {
            share,
            forward_s: alone.forward_s,
            backward_s: alone.backward_s,
            input_gradient_s: totals.halves.as_ref().map(|halves| half_s(&halves.input_gradient_s)),
            weight_gradient_s: totals.halves.as_ref().map(|halves| half_s(&halves.weight_gradient_s)),
            transfer_s: cut_bytes * rate.s_per_byte + rate.latency_s,
            transfer_busy_s: cut_bytes * rate.s_per_byte,
            grad_reduce_s: sync_tail(false),
            exposed_grad_reduce_s,
            memory: if held_once_bytes > 0.0 {
                memory.with_weights(-held_once_bytes, &settings.memory, replicas)
            } else {
                memory
            },
            capacity_bytes: alone.capacity_bytes,
        })
    }

    /// Returns for each stage what tied weights add. Returns an empty list if the model has none.
    fn shared(&self, plan: &CandidatePlan, group_of: Option<&[u32]>) -> Vec<TiedWeightCost> {
        if self.model.ties.is_empty() {
            return Vec::new();
        }
        let own: Vec<u32> = (0..plan.stages.len() as u32).collect();
        let group_of = group_of.unwrap_or(&own);
        let cuts: Vec<(usize, usize)> = plan.stages.iter().map(|stage| (stage.begin, stage.end)).collect();
        (cost::shared(self.model, &cuts, group_of).into_iter().zip(&cuts))
            .map(|(shared, &cuts)| TiedWeightCost {
                tied_s: (shared.sums.iter())
                    .map(|(bytes, groups)| {
                        let rate = self.all_reduce(plan, group_of, groups);
                        bytes * rate.s_per_byte + rate.latency_s
                    })
                    .sum(),
                held_once_bytes: cost::tied_weights::copied_bytes(self.model, cuts) - shared.copied_bytes,
                apart: shared.apart,
            })
            .collect()
    }

    /// Returns the all-reduce rate over all devices of some groups.
    fn all_reduce(&self, plan: &CandidatePlan, group_of: &[u32], groups: &[u32]) -> Rate {
        let mut on_machine: std::collections::BTreeMap<u32, u32> = std::collections::BTreeMap::new();
        for group in groups {
            let first = group_of.iter().position(|other| other == group);
            for &(machine, count) in first.iter().flat_map(|&first| &plan.stages[first].footprint) {
                *on_machine.entry(machine).or_default() += count;
            }
        }
        self.cluster.all_reduce(on_machine.len() as u32, on_machine.into_values().max().unwrap_or(1))
    }

    /// Evaluates and simulates a plan, whether or not it fits the devices' memory.
    ///
    /// # Errors
    /// As [`PlanEvaluator::stages`]; [`Error::Schedule`] if windows grow along the stages, so that they wait for each other.
    pub fn price(&mut self, plan: &CandidatePlan) -> Result<EvaluatedPlan> {
        let (stages, max_in_flights) = (self.stages(plan)?, plan.max_in_flights());
        let step_s = self.step_s(&stages, &max_in_flights, plan.micro_batch)?;
        Ok(EvaluatedPlan { step_s, path_s: self.path_s(&stages, &max_in_flights, plan.micro_batch), stages })
    }

    /// Simulates stages with these costs and numbers in flight, in micro-batches of `micro_batch` samples.
    ///
    /// # Errors
    /// [`Error::Schedule`] if windows grow along the stages.
    pub(crate) fn step_s(&mut self, stages: &[StageCost], max_in_flights: &[u32], micro_batch: u32) -> Result<f64> {
        let micro_batches = self.settings.global_batch / micro_batch;
        self.simulated += 1;
        self.actions += 2 * u64::from(micro_batches) * max_in_flights.len() as u64;
        let shapes = stages
            .iter()
            .zip(max_in_flights)
            .map(|(stage, &max_in_flight)| path_stage(stage, (max_in_flight, max_in_flight)));
        if let Some(step_s) = self.clock.step_s(shapes.clone(), micro_batches) {
            return Ok(step_s);
        }
        let messages: Vec<Transfer> =
            shapes.map(|shape| Transfer { busy_s: shape.busy_s, latency_s: shape.latency_s }).collect();
        let costs = Costs {
            compute: stages.iter().map(|stage| StageTimes::new(stage.forward_s, stage.backward_s)).collect(),
            activation: messages.clone(),
            gradient: messages,
            gradient_sync_s: stages.iter().map(|stage| stage.exposed_grad_reduce_s).collect(),
            optimizer_s: vec![0.0; stages.len()],
        };
        Sweep::default().step_s(&one_f_one_b(max_in_flights, micro_batches), &costs, Links::Queued)
    }

    /// Returns the longest path through stages with these numbers in flight. It is the step, or a little less.
    pub(crate) fn path_s(&self, stages: &[StageCost], max_in_flights: &[u32], micro_batch: u32) -> f64 {
        self.max_path_s(stages, max_in_flights.iter().map(|&max_in_flight| (max_in_flight, max_in_flight)), micro_batch)
    }

    /// Returns a lower bound on the longest path over all numbers in flight in these ranges.
    pub(crate) fn max_path_s(
        &self,
        stages: &[StageCost],
        max_in_flights: impl DoubleEndedIterator<Item = (u32, u32)> + ExactSizeIterator,
        micro_batch: u32,
    ) -> f64 {
        let mut paths = Paths::default();
        let mut next_max_in_flight = 1;
        for (stage, max_in_flights) in stages.iter().zip(max_in_flights).rev() {
            paths = paths.extend(
                &path_stage(stage, max_in_flights),
                next_max_in_flight,
                self.settings.global_batch / micro_batch,
            );
            next_max_in_flight = max_in_flights.0;
        }
        paths.synced_s
    }

    /// Returns for each node the first equal node on which every stage of the plan has as many devices.
    pub(crate) fn alike(&self, plan: &CandidatePlan) -> Vec<u32> {
        let mut first = rustc_hash::FxHashMap::default();
        (0..)
            .zip(self.cluster.machines.iter().zip(self.held(plan)))
            .map(|(number, (machine, held))| *first.entry((kind(machine), held)).or_insert(number))
            .collect()
    }

    /// Returns the plan with equal nodes renamed, in the order of the stages that they take part in.
    pub(crate) fn in_order(&self, plan: &CandidatePlan) -> CandidatePlan {
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

    /// Returns the stages of a plan on each node, with their devices there.
    fn held(&self, plan: &CandidatePlan) -> Vec<Vec<(usize, u32)>> {
        let mut held = vec![Vec::new(); self.cluster.machines.len()];
        for (index, stage) in plan.stages.iter().enumerate() {
            for &(machine, count) in &stage.footprint {
                held[machine as usize].push((index, count));
            }
        }
        held
    }

    /// Returns whether the model has tied weights.
    #[must_use]
    pub fn shares_weights(&self) -> bool {
        !self.model.ties.is_empty()
    }

    /// Returns whether the memory of every stage fits its devices.
    #[must_use]
    pub fn fits(stages: &[StageCost]) -> bool {
        stages.iter().all(|stage| stage.memory.total_bytes() <= stage.capacity_bytes)
    }
}
