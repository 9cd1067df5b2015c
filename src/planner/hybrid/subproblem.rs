//! The planning problem for one micro-batch size, with one choice of recomputation, and tables that all passes over it
//! share.

use std::ops::RangeInclusive;
use std::sync::Arc;

use rayon::prelude::*;
use rustc_hash::FxHashMap;

use crate::cost::network::Cluster;
use crate::cost::{LayerSums, Totals};
use crate::planner::hybrid::{
    bounds::nested_stages::CutSets,
    evaluate::{stage_cost::BaseCost, stage_memory::StageMemory},
    settings::{Recompute, Settings},
};

/// The planning problem for one micro-batch size, with one choice of recomputation.
pub(crate) struct Subproblem<'a> {
    pub model: &'a LayerSums,
    pub cluster: &'a Cluster,
    pub settings: &'a Settings,
    pub micro_batch: u32,
    pub recompute: Recompute,
    pub micro_batches: u32,
    /// Index into `totals` for each number of replicas, or `None` if that split is not allowed.
    pub totals_index: Vec<Option<u32>>,
    /// Sums over the layers below each cut, for each number of samples that a replica may get.
    pub totals: Vec<Totals>,
    /// Sums that no larger share goes below, for each entry of `totals`. Empty if `totals` are such sums.
    least: Vec<Totals>,
    /// Samples per replica of each entry of `totals`.
    pub samples: Vec<u32>,
    /// Bytes of a whole micro-batch that cross each cut.
    pub cut_bytes: Vec<f64>,
    /// Cuts of a branching model as sets of layers, shared by all subproblems.
    pub sets: Option<Arc<CutSets<'a>>>,
}

impl<'a> Subproblem<'a> {
    /// Returns one subproblem for each micro-batch size and each allowed choice of recomputation.
    ///
    /// If all stages must have the same number of replicas, there is one for each number: with a fixed number, equality
    /// needs no state in the search.
    pub(crate) fn all(model: &'a LayerSums, cluster: &'a Cluster, settings: &'a Settings) -> Vec<Self> {
        let mut choices: Vec<(u32, Recompute, RangeInclusive<u32>)> = Vec::new();
        for &micro_batch in &settings.pipeline_micro_batch_sizes {
            for &recompute in &settings.recompute {
                let any = 1..=cluster.devices();
                if settings.equal_replicas {
                    let allowed = any.filter(|&replicas| settings.samples_per_replica(micro_batch, replicas).is_some());
                    choices.extend(allowed.map(|replicas| (micro_batch, recompute, replicas..=replicas)));
                } else {
                    choices.push((micro_batch, recompute, any));
                }
            }
        }
        // The sets depend on the model alone, so all subproblems share them.
        let sets = (!model.is_chain).then(|| Arc::new(CutSets::new(model)));
        (choices.into_par_iter())
            .map(|(micro_batch, recompute, replicas)| {
                let task = Self::new(model, cluster, settings, micro_batch, recompute, &replicas);
                Self { sets: sets.clone(), ..task }
            })
            .collect()
    }

    fn new(
        model: &'a LayerSums,
        cluster: &'a Cluster,
        settings: &'a Settings,
        micro_batch: u32,
        recompute: Recompute,
        allowed: &RangeInclusive<u32>,
    ) -> Self {
        let devices = cluster.devices();
        let (mut totals, mut samples) = (Vec::new(), Vec::new());
        // Many numbers of replicas round to the same samples per replica, so sums are stored by samples.
        let mut known: FxHashMap<u32, u32> = FxHashMap::default();
        let totals_index: Vec<Option<u32>> = (0..=devices)
            .map(|replicas| {
                let per_replica = if allowed.contains(&replicas) {
                    settings.samples_per_replica(micro_batch, replicas)
                } else {
                    None
                }?;
                Some(*known.entry(per_replica).or_insert_with(|| {
                    totals.push(model.totals(per_replica));
                    samples.push(per_replica);
                    totals.len() as u32 - 1
                }))
            })
            .collect();
        let least = if model.grows_with_samples() {
            Vec::new()
        } else {
            samples.iter().map(|&samples| model.least_totals(samples)).collect()
        };
        Self {
            least,
            model,
            cluster,
            settings,
            micro_batch,
            recompute,
            // Exact, since `Settings::check` requires divisors of the global batch.
            micro_batches: settings.global_batch / micro_batch,
            totals_index,
            totals,
            samples,
            cut_bytes: model.totals(micro_batch).boundary_bytes,
            sets: None,
        }
    }

    /// Returns sums that no share of at least the samples of `totals[index]` goes below.
    pub(crate) fn least_totals(&self, index: u32) -> &Totals {
        self.least.get(index as usize).unwrap_or(&self.totals[index as usize])
    }

    /// Returns whether no time and no bytes of a layer fall as a share grows.
    pub(crate) fn grows_with_shares(&self) -> bool {
        self.least.is_empty()
    }

    /// Returns the memory of the stage between two cuts at the highest ZeRO stage, which needs the least. `totals` has the
    /// sums for its samples.
    pub(crate) fn memory(&self, totals: &Totals, cuts: (usize, usize), replicas: u32) -> StageMemory {
        self.memory_at(self.settings.memory.max_zero_stage, totals, cuts, replicas)
    }

    /// Returns the memory of the stage between two cuts at a ZeRO stage.
    pub(crate) fn memory_at(
        &self,
        zero_stage: u8,
        totals: &Totals,
        cuts: (usize, usize),
        replicas: u32,
    ) -> StageMemory {
        let options = self.settings.memory.at_zero_stage(zero_stage);
        StageMemory::new(self.model, totals, &options, cuts, replicas, self.recompute)
    }

    /// Returns the cost of a stage that recomputes its activations if that is allowed and they do not fit with
    /// `in_flight` micro-batches, from the cost with kept ones.
    pub(crate) fn settled(&self, kept: BaseCost, in_flight: u32) -> BaseCost {
        let is_short = self.recompute == Recompute::ByStage && kept.memory.bytes_with(in_flight) > kept.capacity_bytes;
        if !is_short {
            return kept;
        }
        let recomputing = kept.recomputing();
        // With few micro-batches in flight, recomputation may need more memory.
        if recomputing.memory.bytes_with(in_flight) < kept.memory.bytes_with(in_flight) { recomputing } else { kept }
    }

    /// Returns the largest number of devices that a plan can use: each layer on the maximum number of replicas.
    pub(crate) fn max_devices(&self) -> u32 {
        // A stage has at least one layer, so this is also the limit on stages times replicas (docs/proofs.md, "Devices
        // at work").
        let max = self.totals_index.iter().rposition(Option::is_some).unwrap_or(0) as u32;
        self.cluster.devices().min((self.model.layer_parameter_bytes.len() as u32).saturating_mul(max))
    }
}
