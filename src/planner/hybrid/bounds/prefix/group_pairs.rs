//! Stages between two groups of cuts.
//!
//! Lemma *Cuts in groups* (docs/proofs.md): the stage between two groups has the smallest forward, backward and gradient
//! all-reduce of all stages between a cut of the one and a cut of the other, each by itself, and the largest number of
//! micro-batches in flight. An entry of a group is then not above what the stages in front of any of its cuts add.

use super::builder::TableBuilder;
use super::replica_buckets::{BucketUsage, ReplicaBucket};
use crate::cost;
use crate::planner::hybrid::{
    bounds::nested_stages::{Inner, Synced},
    settings::largest_max_in_flight,
};
use std::sync::Arc;

/// For each group of cuts, minima over the stages of one replica bucket that begin in it and end in a fixed group.
pub(super) struct GroupPair {
    /// Groups in which a stage begins.
    pub(super) some: Vec<usize>,
    /// Shortest forward and backward of each group, at speed 1.
    pub(super) forward_s: Vec<f64>,
    pub(super) backward_s: Vec<f64>,
    /// Number of all-reduce rates of the bucket, and the shortest all-reduce for each group and rate.
    pub(super) rates: usize,
    pub(super) syncs_s: Vec<f64>,
    /// Number of device classes of the bucket, and the largest number in flight for each group and class.
    pub(super) kinds: usize,
    pub(super) fitting: Vec<u32>,
    /// Stages that were evaluated.
    pub(super) looked_at: u64,
}

impl GroupPair {
    pub(super) fn new(groups: usize, split: &ReplicaBucket) -> Self {
        let (rates, kinds) = (split.rates.len(), split.kinds.len());
        Self {
            some: Vec::new(),
            forward_s: vec![f64::INFINITY; groups],
            backward_s: vec![f64::INFINITY; groups],
            syncs_s: vec![f64::INFINITY; groups * rates],
            rates,
            kinds,
            fitting: vec![0; groups * kinds],
            looked_at: 0,
        }
    }

    pub(super) fn add(&mut self, from: usize, forward_s: f64, backward_s: f64) {
        if self.forward_s[from].is_infinite() {
            self.some.push(from);
        }
        self.forward_s[from] = self.forward_s[from].min(forward_s);
        self.backward_s[from] = self.backward_s[from].min(backward_s);
    }

    pub(super) fn add_sync(&mut self, from: usize, which: usize, grad_reduce_s: f64) {
        let min_s = &mut self.syncs_s[from * self.rates + which];
        *min_s = min_s.min(grad_reduce_s);
    }

    pub(super) fn grad_reduce_s(&self, from: usize, which: usize) -> f64 {
        self.syncs_s[from * self.rates + which]
    }

    pub(super) fn fitting(&self, from: usize, which: usize) -> u32 {
        self.fitting[from * self.kinds + which]
    }

    pub(super) fn add_fitting(&mut self, from: usize, which: usize, max_in_flight: u32) {
        let most = &mut self.fitting[from * self.kinds + which];
        *most = max_in_flight.max(*most);
    }
}

/// A stage by its first cut, with its shortest time for one micro-batch at speed 1.
pub(super) struct CutPair {
    pub(super) min_s: f64,
    /// Place in the order of [`crate::cost::LayerSums::begins`].
    pub(super) index: usize,
    pub(super) begin: usize,
}

/// The stages that end at one cut.
pub(super) struct StagesEndingAt {
    pub(super) end: usize,
    pub(super) pairs: Vec<CutPair>,
    pub(super) inner: Option<Arc<Inner>>,
}

impl TableBuilder<'_> {
    /// Returns the largest number of micro-batches in flight that fits a stage on devices of a class; 0 if none does.
    pub(super) fn fitting(&self, split: &ReplicaBucket, kind: &BucketUsage, stage: (usize, usize)) -> u32 {
        let task = self.task;
        let totals = &task.totals[split.share as usize];
        let held = cost::memory(task.model, totals, &task.settings.memory, stage, split.most, 1, task.recompute);
        largest_max_in_flight(1, task.micro_batches, |max_in_flight| {
            held.bytes_with(max_in_flight) <= kind.memory_bytes
        })
        .unwrap_or(0)
    }

    /// Returns the stages that end at a cut and work for less than the threshold with some number of replicas, shortest
    /// first.
    pub(super) fn pairs(&self, end: usize) -> Vec<CutPair> {
        let model = self.task.model;
        let mut pairs = Vec::new();
        for (index, begin) in model.begins(end).enumerate() {
            let begin = begin as usize;
            let pair = CutPair { min_s: self.min_below_s[end] - self.min_below_s[begin], index, begin };
            if self.is_short_for(&pair, 1.0) {
                pairs.push(pair);
            } else if model.is_chain {
                break;
            }
        }
        pairs.sort_by(|a, b| a.min_s.total_cmp(&b.min_s));
        pairs
    }

    /// Returns whether a stage may work for less than the threshold if its layers take `slower` times their shortest
    /// time.
    pub(super) fn is_short_for(&self, pair: &CutPair, slower: f64) -> bool {
        let min_s = f64::from(self.task.micro_batches) * slower * pair.min_s;
        min_s * (1.0 - 1e-9) < self.threshold_s * self.speed
    }

    /// Returns the minima over all stages of a bucket that end in the group `to`.
    pub(super) fn between(&self, to: usize, split: &ReplicaBucket, ends: &[StagesEndingAt]) -> GroupPair {
        let task = self.task;
        let (model, micro_batches) = (task.model, f64::from(task.micro_batches));
        let totals = &task.totals[split.share as usize];
        let overlap = task.settings.overlap_sync;
        let mut between = GroupPair::new(to + 1, split);
        let fastest = split.kinds.iter().map(|kind| kind.speed).fold(0.0, f64::max);
        for StagesEndingAt { end, pairs, inner } in ends {
            let (end, inner) = (*end, inner.as_deref());
            let mut syncs: Vec<Synced<'_>> = (split.rates.iter())
                .map(|&(rate, speed)| Synced::new(model, totals, rate, speed, overlap, end))
                .collect();
            for pair in pairs {
                if !self.is_short_for(pair, split.slower) {
                    break;
                }
                let &CutPair { begin, index, .. } = pair;
                let forward_s = totals.forward_s[end] - totals.forward_s[begin];
                let backward_s = totals.backward_s[end] - totals.backward_s[begin];
                let backward_s = if task.recompute { backward_s + forward_s } else { backward_s };
                let is_long = |speed: f64| micro_batches * (forward_s / speed + backward_s / speed) >= self.threshold_s;
                if is_long(fastest) {
                    continue;
                }
                between.looked_at += 1;
                let from = self.axes.groups.of_cut[begin] as usize;
                between.add(from, forward_s, backward_s);
                for (which, sync) in syncs.iter_mut().enumerate() {
                    between.add_sync(from, which, sync.sum(index, inner));
                }
                for (which, kind) in split.kinds.iter().enumerate() {
                    if !is_long(kind.speed) && between.fitting(from, which) < task.micro_batches {
                        between.add_fitting(from, which, self.fitting(split, kind, (begin, end)));
                    }
                }
            }
        }
        between
    }
}
