//! Stages between two groups of cuts.
//!
//! Lemma *Cuts in groups* (docs/proofs.md): the stage between two groups has the shortest forward, the shortest
//! backward and the shortest gradient all-reduce of all stages between a cut of the one and a cut of the other, each by
//! itself, and the largest number of micro-batches in flight. So an entry is not above the increments of any prefix of
//! any cut of the group.

use super::builder::TableBuilder;
use super::replica_buckets::{BucketUsage, ReplicaBucket};
use crate::planner::hybrid::{
    bounds::nested_stages::{Inner, Synced},
    evaluate::stage_memory::Fitting,
    settings::Recompute,
};
use std::sync::Arc;

/// Minima over the stages of one replica bucket that end in a fixed group, for each group in which they begin.
pub(super) struct GroupPair {
    /// Groups in which at least one stage begins.
    pub(super) begin_groups: Vec<usize>,
    /// Shortest forward of each group, at speed 1.
    pub(super) forward_s: Vec<f64>,
    /// Shortest backward of each group, at speed 1. It contains the repeated forward if all stages recompute
    /// their activations.
    pub(super) backward_s: Vec<f64>,
    /// Number of all-reduce rates of the bucket.
    pub(super) num_rates: usize,
    /// Shortest exposed all-reduce for each group and rate.
    pub(super) syncs_s: Vec<f64>,
    /// Number of device classes of the bucket.
    pub(super) num_usages: usize,
    /// Largest numbers of micro-batches in flight for each group and class.
    fitting: Vec<Fitting>,
    /// Number of stages that were evaluated, for the count of work.
    pub(super) num_evaluated: u64,
}

impl GroupPair {
    /// Returns minima over no stage at all.
    pub(super) fn new(groups: usize, bucket: &ReplicaBucket) -> Self {
        let (num_rates, num_usages) = (bucket.rates.len(), bucket.usages.len());
        Self {
            begin_groups: Vec::new(),
            forward_s: vec![f64::INFINITY; groups],
            backward_s: vec![f64::INFINITY; groups],
            syncs_s: vec![f64::INFINITY; groups * num_rates],
            num_rates,
            num_usages,
            fitting: vec![Fitting::default(); groups * num_usages],
            num_evaluated: 0,
        }
    }

    /// Takes the times of one more stage into the minima of the group `from`.
    pub(super) fn add(&mut self, from: usize, forward_s: f64, backward_s: f64) {
        if self.forward_s[from].is_infinite() {
            self.begin_groups.push(from);
        }
        self.forward_s[from] = self.forward_s[from].min(forward_s);
        self.backward_s[from] = self.backward_s[from].min(backward_s);
    }

    /// Takes an exposed all-reduce at the rate with index `rate` into the minimum.
    pub(super) fn add_sync(&mut self, from: usize, rate: usize, grad_reduce_s: f64) {
        let min_s = &mut self.syncs_s[from * self.num_rates + rate];
        *min_s = min_s.min(grad_reduce_s);
    }

    /// Returns the shortest exposed all-reduce at the rate with index `rate`.
    pub(super) fn grad_reduce_s(&self, from: usize, rate: usize) -> f64 {
        self.syncs_s[from * self.num_rates + rate]
    }

    /// Returns the largest numbers in flight on the device class with index `usage`. They are 0 if no stage fits.
    pub(super) fn fitting(&self, from: usize, usage: usize) -> Fitting {
        self.fitting[from * self.num_usages + usage]
    }

    /// Takes one more stage's numbers in flight into the maxima.
    fn add_fitting(&mut self, from: usize, usage: usize, stage: Fitting) {
        let Fitting { kept, recomputed } = &mut self.fitting[from * self.num_usages + usage];
        (*kept, *recomputed) = (stage.kept.max(*kept), stage.recomputed.max(*recomputed));
    }
}

/// A stage between two cuts, of which the second one is known.
pub(super) struct CutPair {
    /// Shortest time of one micro-batch over all replica counts, at speed 1.
    pub(super) min_s: f64,
    /// Index in the order of [`crate::cost::LayerSums::begins`].
    pub(super) index: usize,
    /// Cut below its first layer.
    pub(super) begin: usize,
}

/// The stages that end at one cut.
pub(super) struct StagesEndingAt {
    pub(super) end: usize,
    /// Stages that may work for less than the threshold, shortest first.
    pub(super) pairs: Vec<CutPair>,
    /// Smaller stages from which the all-reduce follows. `None` for a chain, and if there are too many to keep.
    pub(super) inner: Option<Arc<Inner>>,
}

impl TableBuilder<'_> {
    /// Returns the largest numbers of micro-batches in flight of a stage that fit devices of a class.
    fn fitting(&self, bucket: &ReplicaBucket, usage: &BucketUsage, stage: (usize, usize)) -> Fitting {
        let task = self.task;
        let totals = bucket.totals(task);
        task.memory(totals, stage, bucket.max_replicas).fitting(task.micro_batches, usage.memory_bytes)
    }

    /// Returns the stages that end at a cut and may work for less than the threshold with some number of replicas,
    /// shortest first.
    pub(super) fn pairs(&self, end: usize) -> Vec<CutPair> {
        let model = self.task.model;
        let mut pairs = Vec::new();
        for (index, begin) in model.begins(end).enumerate() {
            let begin = begin as usize;
            let pair = CutPair { min_s: self.min_below_s[end] - self.min_below_s[begin], index, begin };
            if self.is_short_for(&pair, 1.0) {
                pairs.push(pair);
            } else if model.is_chain {
                // In a chain, stages that begin earlier have these layers and more. A branching model has no such
                // order.
                break;
            }
        }
        pairs.sort_by(|a, b| a.min_s.total_cmp(&b.min_s));
        pairs
    }

    /// Returns whether a stage may work for less than the threshold if its layers take at least `slowdown` times their
    /// shortest time.
    pub(super) fn is_short_for(&self, pair: &CutPair, slowdown: f64) -> bool {
        let min_s = f64::from(self.task.micro_batches) * slowdown * pair.min_s;
        min_s * (1.0 - 1e-9) < self.threshold_s * self.max_speed
    }

    /// Returns the minima over all stages of a bucket that end in the group `to`. `ends` has the cuts of this group.
    pub(super) fn group_pair(&self, to: usize, bucket: &ReplicaBucket, ends: &[StagesEndingAt]) -> GroupPair {
        let task = self.task;
        let (model, micro_batches) = (task.model, f64::from(task.micro_batches));
        let totals = bucket.totals(task);
        let overlap = task.settings.overlap_sync;
        let mut minima = GroupPair::new(to + 1, bucket);
        let fastest = bucket.usages.iter().map(|usage| usage.speed).fold(0.0, f64::max);
        for StagesEndingAt { end, pairs, inner } in ends {
            let (end, inner) = (*end, inner.as_deref());
            let mut syncs: Vec<Synced<'_>> = (bucket.rates.iter())
                .map(|&(rate, speed)| Synced::new(model, totals.at_speed(speed), rate, overlap, end))
                .collect();
            for pair in pairs {
                if !self.is_short_for(pair, bucket.min_slowdown) {
                    break; // Pairs are sorted, so all that follow are longer.
                }
                let &CutPair { begin, index, .. } = pair;
                let forward_s = totals.forward_s[end] - totals.forward_s[begin];
                let backward_s = totals.backward_s[end] - totals.backward_s[begin];
                let backward_s = backward_s + (task.recompute.min_forwards() - 1.0) * forward_s;
                let is_long = |speed: f64| micro_batches * (forward_s / speed + backward_s / speed) >= self.threshold_s;
                if is_long(fastest) {
                    continue;
                }
                minima.num_evaluated += 1;
                let from = self.axes.groups.of_cut[begin] as usize;
                minima.add(from, forward_s, backward_s);
                for (rate, sync) in syncs.iter_mut().enumerate() {
                    minima.add_sync(from, rate, sync.sum(index, inner));
                }
                for (at, usage) in bucket.usages.iter().enumerate() {
                    // No stage holds more than all micro-batches, so once one does, the maxima are known: kept
                    // activations make the shorter stage.
                    let Fitting { kept, recomputed } = minima.fitting(from, at);
                    let known = if task.recompute == Recompute::Always { recomputed } else { kept };
                    if !is_long(usage.speed) && known < task.micro_batches {
                        minima.add_fitting(from, at, self.fitting(bucket, usage, (begin, end)));
                    }
                }
            }
        }
        minima
    }
}
