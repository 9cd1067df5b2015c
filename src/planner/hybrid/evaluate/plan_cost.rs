//! Cost of a plan: the cost of every stage, tied weights and the simulated step.
//!
//! Lemma *Tied weights* (docs/proofs.md#tied-weights): the search ignores tied weights in its times, and no plan is
//! faster than it assumes. This module adds their all-reduces.

use super::candidate_plan::{CandidatePlan, StageCandidate};
use super::shares::{EqualReplicas, Shares};
use super::stage_cost::{BaseCost, StageCost, StageDevices, path_stage, transfer};
use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::cost::layer_sums::Halves;
use crate::cost::network::{Cluster, Node, Rate};
use crate::cost::{self, LayerSums, Memory, Totals};
use crate::error::{Error, Result};
use crate::planner::effort::passes;
use crate::planner::hybrid::{
    bounds::paths::Paths,
    evaluate::pipeline_simulator::PipelineSimulator,
    settings::{Recompute, Settings},
};
use crate::schedule::one_f_one_b;
use crate::simulate::{Costs, Links, StageTimes, Sweep, Transfer};

/// Returns a key that is equal for nodes with equal devices.
fn node_type(node: &Node) -> (u32, u64, u64, u32) {
    (node.devices, node.memory_bytes.to_bits(), node.speed.to_bits(), node.kind)
}

/// Costs of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluatedPlan {
    /// Simulated step time in seconds.
    pub step_s: f64,
    /// Longest path of the plan in seconds. It is at most `step_s`.
    pub path_s: f64,
    /// Costs of the stages, the first one first.
    pub stages: Vec<StageCost>,
}

/// Additions of tied weights to the cost of a stage.
struct TiedWeightCost {
    /// Time of all-reduces over the devices of several stages, in seconds.
    tied_s: f64,
    /// Bytes of copies that another stage on the same devices holds already.
    held_once_bytes: f64,
    /// Pairs of a layer and the bytes of its weights that the stage does not reduce by itself.
    excluded: Vec<(u32, f64)>,
}

/// Evaluator of plans of one model on one cluster. It keeps the layer sums of each number of samples.
pub struct PlanEvaluator<'a> {
    pub(crate) model: &'a LayerSums,
    cluster: &'a Cluster,
    pub(crate) settings: &'a Settings,
    simulator: PipelineSimulator,
    /// Layer sums by number of samples.
    pub(crate) totals: rustc_hash::FxHashMap<u32, Totals>,
    /// Number of plans that were simulated.
    pub simulated: u64,
    /// Number of actions of these plans.
    pub actions: u64,
}

/// Costs of a stage over groups of equal replicas. Each pass is that of the slowest group.
#[derive(Default)]
struct SlowestReplicas {
    forward_s: f64,
    /// Backward without a repeated forward.
    kept_backward_s: f64,
    /// Seconds of messages that lengthen each forward and each backward.
    exposed_comm_s: (f64, f64),
    zero_stage: u8,
    /// Memory of the devices that have the least left, and its capacity.
    memory: Memory,
    capacity_bytes: f64,
    /// Memory and capacity of each group, with one micro-batch in flight.
    memory_by_share: Vec<(Memory, f64)>,
}

impl SlowestReplicas {
    /// Returns the costs over all groups. The stage has at least `min_in_flight` micro-batches in flight.
    fn of(groups: impl Iterator<Item = BaseCost>, stage: &StageCandidate, min_in_flight: u32) -> Self {
        let mut all = Self::default();
        let mut least_free_bytes = f64::INFINITY;
        for kept in groups {
            all.forward_s = all.forward_s.max(kept.forward_s);
            all.kept_backward_s = all.kept_backward_s.max(kept.backward_s);
            let alone = if stage.recompute { kept.recomputing() } else { kept };
            let alone = alone.sharded(min_in_flight);
            // Of several groups, none shards more than the optimizer state, which has no messages in passes.
            let (forward_s, backward_s) = alone.exposed_comm_s();
            all.exposed_comm_s = (all.exposed_comm_s.0.max(forward_s), all.exposed_comm_s.1.max(backward_s));
            all.zero_stage = alone.zero_stage;
            let memory = alone.memory.with_in_flight(stage.max_in_flight);
            let free_bytes = alone.capacity_bytes - memory.total_bytes();
            if all.memory_by_share.is_empty() || free_bytes < least_free_bytes {
                (all.memory, all.capacity_bytes, least_free_bytes) = (memory, alone.capacity_bytes, free_bytes);
            }
            all.memory_by_share.push((alone.memory, alone.capacity_bytes));
        }
        all
    }
}

impl<'a> PlanEvaluator<'a> {
    /// Returns an evaluator without any sums yet.
    #[must_use]
    pub fn new(model: &'a LayerSums, cluster: &'a Cluster, settings: &'a Settings) -> Self {
        Self {
            model,
            cluster,
            settings,
            simulator: PipelineSimulator::default(),
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

    /// Returns the cost of every stage of a plan whose stages may share devices. `group_of` has the group of devices of
    /// each stage. Stages of a group hold a tied weight once. All other costs are as if each stage had separate
    /// devices.
    ///
    /// # Errors
    /// The errors of [`PlanEvaluator::stages`].
    pub fn stages_of(&mut self, plan: &CandidatePlan, group_of: Option<&[u32]>) -> Result<Vec<StageCost>> {
        let shared = self.shared(plan, group_of);
        if self.settings.equal_replicas && plan.stages.windows(2).any(|two| two[0].replicas() != two[1].replicas()) {
            return Err(Error::argument(
                "stages have different numbers of replicas, but they must be equal",
                "give each stage the same number of devices",
            ));
        }
        (0..plan.stages.len()).map(|index| self.stage(plan, index, shared.get(index))).collect()
    }

    /// Returns the cost of every stage of a plan that differs from the plan `known` in a few stages. Equal stages keep
    /// the known cost.
    ///
    /// # Errors
    /// The errors of [`PlanEvaluator::stages`].
    pub(crate) fn stages_but(
        &mut self,
        plan: &CandidatePlan,
        known: (&CandidatePlan, &[StageCost]),
    ) -> Result<Vec<StageCost>> {
        let (other, costs) = known;
        // A tied weight makes the cost of a stage depend on stages that are not its neighbors.
        let is_alike = (plan.stages.len(), plan.micro_batch) == (other.stages.len(), other.micro_batch);
        if !is_alike || self.settings.equal_replicas || self.shares_weights() {
            return self.stages(plan);
        }
        (0..plan.stages.len())
            .map(|index| {
                let is_alike_at = |at: usize| {
                    let [one, two] = [plan, other].map(|plan| plan.stages.get(at).map(|stage| &stage.footprint));
                    one == two
                };
                // The cost includes the transfer to the next stage, so that stage's devices must be equal, too. The
                // transfer from the stage before only counts if it does not overlap with computation.
                let is_known = plan.stages[index] == other.stages[index]
                    && is_alike_at(index + 1)
                    && (self.settings.overlap_p2p_comm || index == 0 || is_alike_at(index - 1));
                if is_known { Ok(costs[index].clone()) } else { self.stage(plan, index, None) }
            })
            .collect()
    }

    /// Returns the cost of every stage after [`PlanEvaluator::settle`].
    ///
    /// # Errors
    /// The errors of [`PlanEvaluator::stages`].
    pub(crate) fn settled(&mut self, plan: &mut CandidatePlan) -> Result<Vec<StageCost>> {
        let costs = self.stages(plan)?;
        self.settle(plan, costs)
    }

    /// Returns the plan with each choice of recomputation of its stages that may be the best one, if the settings leave
    /// that to each stage. Beyond [`passes::OPEN_STAGES`] stages with a choice, returns two: none of these recomputes,
    /// or all do.
    /// A plan without costs is returned as it is.
    pub(crate) fn recomputations(&mut self, plan: CandidatePlan) -> Vec<CandidatePlan> {
        if !self.settings.recompute.contains(&Recompute::ByStage) || self.stages(&plan).is_err() {
            return vec![plan];
        }
        let mut kept = plan.clone().with_recompute(Recompute::Never);
        let mut again = plan.with_recompute(Recompute::Always);
        for plan in [&mut kept, &mut again] {
            // Costs exist, since recomputation changes none of their conditions.
            let _ = self.settled(plan);
        }
        let open: Vec<usize> = (0..kept.stages.len())
            .filter(|&stage| kept.stages[stage].recompute != again.stages[stage].recompute)
            .collect();
        if open.len() > passes::OPEN_STAGES {
            return vec![kept, again];
        }
        let chosen = |bits: u32| {
            let mut plan = kept.clone();
            open.iter().enumerate().for_each(|(bit, &stage)| plan.stages[stage].recompute = bits >> bit & 1 == 1);
            plan
        };
        (0..1_u32 << open.len()).map(chosen).collect()
    }

    /// Decides which stages of a plan recompute their activations, if the settings leave that to each stage.
    ///
    /// A stage keeps its activations if it fits with the largest number in flight that the schedule allows. If it does
    /// not fit with the smallest one, it takes the choice that needs less memory. Otherwise both have advantages, and it
    /// stays as it is.
    /// Returns the costs of its stages, from the costs before.
    ///
    /// # Errors
    /// The errors of [`PlanEvaluator::stages`].
    pub(crate) fn settle(&mut self, plan: &mut CandidatePlan, costs: Vec<StageCost>) -> Result<Vec<StageCost>> {
        if !self.settings.recompute.contains(&Recompute::ByStage) {
            return Ok(costs);
        }
        let before = plan.clone();
        let micro_batches = self.settings.global_batch / plan.micro_batch;
        let from_end = (1..=plan.stages.len() as u32).rev();
        for ((stage, cost), from_end) in plan.stages.iter_mut().zip(&costs).zip(from_end) {
            let (min, max) = self.settings.max_in_flights(from_end, micro_batches);
            let kept = if cost.recompute { cost.memory.keeping() } else { cost.memory };
            let fits = |in_flight| kept.bytes_with(in_flight) <= cost.capacity_bytes;
            if fits(max) {
                stage.recompute = false;
            } else if !fits(min) {
                let input_bytes = self.totals[&cost.samples_per_replica].boundary_bytes[stage.begin];
                stage.recompute = kept.recomputing(input_bytes).bytes_with(min) < kept.bytes_with(min);
            }
        }
        if *plan == before { Ok(costs) } else { self.stages_but(plan, (&before, &costs)) }
    }

    /// Returns the cost of one stage. `shared` has the additions of tied weights, if the model has any.
    fn stage(&mut self, plan: &CandidatePlan, index: usize, shared: Option<&TiedWeightCost>) -> Result<StageCost> {
        let (micro_batch, stage) = (plan.micro_batch, &plan.stages[index]);
        let replicas = stage.replicas();
        let Some(samples_per_replica) = self.settings.samples_per_replica(micro_batch, replicas) else {
            return Err(Error::argument(
                format!(
                    "stage {index} cannot split a micro-batch of {micro_batch} over {replicas} replicas: each needs {} or \
                     more samples{}",
                    self.settings.min_samples_per_replica,
                    if self.settings.uneven_shares { "" } else { ", all the same number" }
                ),
                format!("give stage {index} fewer devices, or use larger micro-batches"),
            ));
        };
        let (model, settings) = (self.model, self.settings);
        let devices = StageDevices::of(self.cluster, stage.footprint.iter().copied());
        let cuts = (stage.begin, stage.end);
        let by_speed = if settings.shares_by_speed {
            Shares::by_speed(model, self.cluster, settings.min_samples_per_replica, (micro_batch, stage))
        } else {
            None
        };
        let even =
            [EqualReplicas { samples: samples_per_replica, pace: devices.pace, memory_bytes: devices.memory_bytes }];
        let groups = by_speed.as_ref().map_or(&even[..], |shares| &shares.groups);
        // Few distinct numbers of samples occur, so keep their layer sums instead of computing them for each stage.
        for samples in groups.iter().map(|group| group.samples).chain([micro_batch]) {
            self.totals.entry(samples).or_insert_with(|| model.totals(samples));
        }
        // The replicas together send the whole micro-batch, so its bytes are taken at `micro_batch`, not at the samples
        // of one replica.
        let boundary_bytes = &self.totals[&micro_batch].boundary_bytes;
        let link = |front: usize| match plan.stages.get(front..front + 2) {
            Some([from, to]) => {
                let rate = transfer(self.cluster, &from.footprint, &to.footprint);
                (boundary_bytes[from.end] * rate.s_per_byte, rate.latency_s)
            }
            // The last stage sends nothing.
            _ => (0.0, 0.0),
        };
        let (transfer_busy_s, latency_s) = link(index);
        // The first stage receives nothing.
        let receive_s = if settings.overlap_p2p_comm || index == 0 { 0.0 } else { link(index - 1).0 };
        let excluded = shared.map_or(&[][..], |shared| &shared.excluded);
        let tied_s = shared.map_or(0.0, |shared| shared.tied_s);
        // All-reduces of tied weights come behind all others, so they are exposed in full, with overlap or without.
        let sync_tail = |overlap| {
            let of_groups = groups.iter().map(|group| {
                let totals = &self.totals[&group.samples];
                let tail_s = cost::sync_without_s(model, totals, group.pace, cuts, devices.sync, overlap, excluded);
                (totals.longest_s(group.pace, cuts).1, tail_s)
            });
            cost::exposed_s(of_groups, overlap) + tied_s
        };
        let exposed_grad_reduce_s = sync_tail(settings.overlap_sync);
        let from_end = (plan.stages.len() - index) as u32;
        let min_in_flight = settings.max_in_flights(from_end, settings.global_batch / micro_batch).0;
        let costs = groups.iter().map(|group| {
            let devices = StageDevices { pace: group.pace, memory_bytes: group.memory_bytes, ..devices };
            let totals = &self.totals[&group.samples];
            BaseCost::new(model, totals, settings, &devices, cuts, exposed_grad_reduce_s)
        });
        let SlowestReplicas {
            forward_s,
            kept_backward_s,
            exposed_comm_s: (exposed_forward_comm_s, exposed_backward_comm_s),
            zero_stage,
            memory,
            capacity_bytes,
            memory_by_share,
        } = SlowestReplicas::of(costs, stage, min_in_flight);
        let half_s = |half: fn(&Halves) -> &[f64]| -> Option<f64> {
            let of_kinds = groups.iter().flat_map(|group| self.totals[&group.samples].passes(group.pace));
            of_kinds.map(|passes| Some(passes.between(half(passes.halves?), cuts))).reduce(|a, b| Some(a?.max(b?)))?
        };
        let held_once_bytes = shared.map_or(0.0, |shared| shared.held_once_bytes);
        Ok(StageCost {
            samples_per_replica: groups.iter().map(|group| group.samples).max().unwrap_or(samples_per_replica),
            forward_s,
            // Recomputation repeats the forward of the whole stage before its backward.
            backward_s: if stage.recompute { kept_backward_s + forward_s } else { kept_backward_s },
            input_gradient_s: half_s(|halves| &halves.input_gradient_s),
            weight_gradient_s: half_s(|halves| &halves.weight_gradient_s),
            // A transfer pays its latency even if no bytes cross the cut.
            transfer_s: transfer_busy_s + latency_s,
            transfer_busy_s,
            exposed_transfer_s: settings.exposed_transfer_s(receive_s, transfer_busy_s),
            exposed_forward_comm_s,
            exposed_backward_comm_s,
            grad_reduce_s: sync_tail(false),
            exposed_grad_reduce_s,
            memory: if held_once_bytes > 0.0 {
                memory.with_weights(-held_once_bytes, &settings.memory.at_zero_stage(zero_stage), replicas)
            } else {
                memory
            },
            capacity_bytes,
            memory_by_share: if by_speed.is_some() { memory_by_share } else { Vec::new() },
            samples_by_replica: by_speed.map_or_else(Vec::new, |shares| shares.of_each),
            recompute: stage.recompute,
            zero_stage,
        })
    }

    /// Returns the additions of tied weights for each stage. Returns an empty list if the model has no tied weights.
    fn shared(&self, plan: &CandidatePlan, group_of: Option<&[u32]>) -> Vec<TiedWeightCost> {
        if self.model.tied_weights.is_empty() {
            return Vec::new();
        }
        // Without groups, each stage has separate devices, and so a group of its own.
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
                excluded: shared.apart,
            })
            .collect()
    }

    /// Returns the all-reduce rate over all devices of the listed groups.
    fn all_reduce(&self, plan: &CandidatePlan, group_of: &[u32], groups: &[u32]) -> Rate {
        let mut on_node: std::collections::BTreeMap<u32, u32> = std::collections::BTreeMap::new();
        for group in groups {
            // All stages of a group are on the same devices, so any of them gives the group's.
            let first = group_of.iter().position(|other| other == group);
            for &(node, count) in first.iter().flat_map(|&first| &plan.stages[first].footprint) {
                *on_node.entry(node).or_default() += count;
            }
        }
        // Where nodes hold unequal numbers of replicas, all count like the fullest.
        self.cluster.all_reduce(on_node.len() as u32, on_node.into_values().max().unwrap_or(1))
    }

    /// Evaluates and simulates a plan, whether or not it fits the devices' memory.
    ///
    /// # Errors
    /// The errors of [`PlanEvaluator::stages`]. [`Error::Schedule`] if numbers in flight grow along the stages, so that
    /// they wait for each other.
    pub fn evaluate(&mut self, plan: &CandidatePlan) -> Result<EvaluatedPlan> {
        let (stages, max_in_flights) = (self.stages(plan)?, plan.max_in_flights());
        let step_s = self.step_s(&stages, &max_in_flights, plan.micro_batch)?;
        Ok(EvaluatedPlan { step_s, path_s: self.path_s(&stages, &max_in_flights, plan.micro_batch), stages })
    }

    /// Simulates stages with these costs and numbers in flight, in micro-batches of `micro_batch` samples.
    ///
    /// # Errors
    /// [`Error::Schedule`] if numbers in flight grow along the stages.
    pub(crate) fn step_s(&mut self, stages: &[StageCost], max_in_flights: &[u32], micro_batch: u32) -> Result<f64> {
        let micro_batches = self.settings.global_batch / micro_batch;
        self.simulated += 1;
        self.actions += 2 * u64::from(micro_batches) * max_in_flights.len() as u64;
        let inputs = stages
            .iter()
            .zip(max_in_flights)
            .map(|(stage, &max_in_flight)| path_stage(stage, (max_in_flight, max_in_flight)));
        if let Some(step_s) = self.simulator.step_s(inputs.clone(), micro_batches) {
            return Ok(step_s);
        }
        // The fast simulator refuses invalid input. The general one reports what is invalid.
        let messages: Vec<Transfer> =
            inputs.clone().map(|input| Transfer { busy_s: input.busy_s, latency_s: input.latency_s }).collect();
        let costs = Costs {
            compute: inputs.map(|input| StageTimes::new(input.forward_s, input.backward_s)).collect(),
            activation: messages.clone(),
            gradient: messages,
            gradient_sync_s: stages.iter().map(|stage| stage.exposed_grad_reduce_s).collect(),
            optimizer_s: vec![0.0; stages.len()],
        };
        Sweep::default().step_s(&one_f_one_b(max_in_flights, micro_batches), &costs, Links::Queued)
    }

    /// Returns the longest path through stages with these numbers in flight, in seconds. It is equal to the step, or
    /// slightly shorter.
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
        // From the last stage to the first, as the search composes paths.
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

    /// Returns, for each node, the first node of the same type on which every stage of the plan has the same number of
    /// devices.
    ///
    /// Exchanging such nodes gives an equal plan.
    pub(crate) fn alike(&self, plan: &CandidatePlan) -> Vec<u32> {
        let mut first = rustc_hash::FxHashMap::default();
        (0..)
            .zip(self.cluster.nodes.iter().zip(self.stages_on_nodes(plan)))
            .map(|(number, (node, held))| *first.entry((node_type(node), held)).or_insert(number))
            .collect()
    }

    /// Returns the plan with nodes of equal type renumbered in the order of the stages that they take part in.
    ///
    /// Plans that differ only in the numbers of equal nodes become the same plan.
    pub(crate) fn in_order(&self, plan: &CandidatePlan) -> CandidatePlan {
        let (nodes, held) = (&self.cluster.nodes, self.stages_on_nodes(plan));
        // Nodes of the first stage come first, the one with most of its devices before the others. Idle nodes come
        // last.
        let sort_key = |node: &usize| -> Vec<(usize, Reverse<u32>)> {
            let stages = held[*node].iter().map(|&(stage, count)| (stage, Reverse(count)));
            stages.chain([(usize::MAX, Reverse(0))]).collect()
        };
        let mut of_type: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (number, node) in nodes.iter().enumerate() {
            of_type.entry(node_type(node)).or_default().push(number);
        }
        let mut renamed = vec![0; nodes.len()];
        for numbers in of_type.values() {
            let mut sorted = numbers.clone();
            sorted.sort_by_cached_key(sort_key);
            sorted.into_iter().zip(numbers).for_each(|(old, &new)| renamed[old] = new as u32);
        }
        let mut plan = plan.clone();
        for stage in &mut plan.stages {
            stage.footprint.iter_mut().for_each(|(node, _)| *node = renamed[*node as usize]);
            stage.footprint.sort_unstable();
        }
        plan
    }

    /// Returns pairs `(stage, devices)` for each node.
    fn stages_on_nodes(&self, plan: &CandidatePlan) -> Vec<Vec<(usize, u32)>> {
        let mut held = vec![Vec::new(); self.cluster.nodes.len()];
        for (index, stage) in plan.stages.iter().enumerate() {
            for &(node, count) in &stage.footprint {
                held[node as usize].push((index, count));
            }
        }
        held
    }

    /// Returns whether the model has tied weights.
    #[must_use]
    pub fn shares_weights(&self) -> bool {
        !self.model.tied_weights.is_empty()
    }

    /// Returns whether every stage fits the memory of its devices.
    #[must_use]
    pub fn fits(stages: &[StageCost]) -> bool {
        stages.iter().all(|stage| stage.memory.total_bytes() <= stage.capacity_bytes)
    }
}
