//! Lemma *Cuts in groups* (docs/proofs.md#cuts-in-groups), last paragraph: the gradient all-reduce of a stage of a
//! branching model follows from that of a smaller stage.
//!
//! The first layers between two cuts, in the order of the model, run backward last. Some number of them makes the inner
//! cut a cut again, and leaves a smaller stage between that cut and the outer one. What the smaller stage has left to
//! send is known, and the backwards and messages of these layers follow it. So the result is the same sum in the same
//! order.

use crate::planner::effort::tables;
use std::sync::{Arc, OnceLock};

use rustc_hash::FxHashMap;

#[cfg(test)]
use crate::cost::Totals;
use crate::cost::network::Rate;
use crate::cost::{LayerSums, Passes, SyncTail};

/// Cuts of a branching model as sets of layers.
pub(crate) struct CutSets<'a> {
    model: &'a LayerSums,
    /// Layers below each cut, as bits.
    layers: Vec<Vec<u64>>,
    /// Cut of each set of layers.
    cut_of: FxHashMap<Vec<u64>, u32>,
    /// Stages that end at each cut, found on first use. Empty if they are too many to keep.
    inner: Vec<OnceLock<Arc<Inner>>>,
}

/// Stages of a branching model that end at one cut. Each consists of a smaller stage and of layers that run backward
/// behind all of it.
pub(crate) struct Inner {
    /// One row `(smaller, from, to)` for each begin, in the order of [`LayerSums::begins`]: the index of the smaller
    /// stage, and the range of the other layers in `behind`. An index equal to the number of begins stands for an empty
    /// stage.
    smaller: Vec<(u32, u32, u32)>,
    /// Layers outside the smaller stages, in the order of their backwards.
    behind: Vec<u32>,
}

impl<'a> CutSets<'a> {
    /// Returns the cuts of a model. Stages are found later, by [`CutSets::inner`].
    pub(crate) fn new(model: &'a LayerSums) -> Self {
        let words = model.layer_parameter_bytes.len().div_ceil(64);
        let set = |cut: usize| {
            let mut set = vec![0_u64; words];
            for layer in model.layers_between(0, cut) {
                set[layer as usize / 64] |= 1 << (layer % 64);
            }
            set
        };
        let layers: Vec<Vec<u64>> = (0..model.cuts()).map(set).collect();
        let cut_of = layers.iter().cloned().zip(0..).collect();
        let kept = if model.pairs() <= tables::MAX_KEPT_STAGES { model.cuts() } else { 0 };
        Self { model, layers, cut_of, inner: std::iter::repeat_with(OnceLock::new).take(kept).collect() }
    }

    /// Returns whether stages are kept once they are found. If not, each call of [`CutSets::inner`] finds them again.
    pub(crate) fn is_kept(&self) -> bool {
        !self.inner.is_empty()
    }

    /// Returns the stages that end at a cut.
    pub(crate) fn inner(&self, end: usize) -> Arc<Inner> {
        match self.inner.get(end) {
            Some(kept) => kept.get_or_init(|| Arc::new(self.find(end))).clone(),
            None => Arc::new(self.find(end)),
        }
    }

    /// Finds the stages that end at a cut.
    fn find(&self, end: usize) -> Inner {
        let mut inner = Inner { smaller: Vec::new(), behind: Vec::new() };
        let none = self.model.begins_behind(end, 0) + 1;
        let mut layers_below: Vec<u64> = Vec::new();
        for begin in self.model.begins(end) {
            let from = inner.behind.len();
            layers_below.clone_from(&self.layers[begin as usize]);
            let mut next = none;
            // Layers are numbered in the order of the model, so the lowest bit that is left runs backward last. Add
            // layers until the set is a cut again, which the outer cut is at the latest.
            'whole: for word in 0..layers_below.len() {
                let mut left = self.layers[end][word] & !layers_below[word];
                while left != 0 {
                    let layer = left.trailing_zeros();
                    left &= left - 1;
                    layers_below[word] |= 1 << layer;
                    inner.behind.push(64 * word as u32 + layer);
                    if let Some(&cut) = self.cut_of.get(&layers_below) {
                        if cut as usize != end {
                            next = self.model.begins_behind(end, cut as usize);
                        }
                        break 'whole;
                    }
                }
            }
            // The layers were found from the last backward to the first.
            inner.behind[from..].reverse();
            inner.smaller.push((next as u32, from as u32, inner.behind.len() as u32));
        }
        inner
    }
}

/// Exposed gradient reduction of the stages that end at one cut, for one all-reduce rate and one speed of the
/// backwards.
pub(crate) struct Synced<'a> {
    model: &'a LayerSums,
    end: usize,
    tail: SyncTail<'a>,
    /// Exposed time of each stage in the order of [`LayerSums::begins`], in seconds. NaN where it is not known yet.
    of_begin: Vec<f64>,
}

impl<'a> Synced<'a> {
    /// Returns the reduction of the stages that end at the cut `end`, none of which is known yet. `passes` has the times
    /// for the samples of a replica.
    pub(crate) fn new(model: &'a LayerSums, passes: Passes<'a>, rate: Rate, overlap: bool, end: usize) -> Self {
        Self { model, end, tail: SyncTail::new(model, passes, rate, overlap), of_begin: Vec::new() }
    }

    /// Returns the exposed time of the stage with this index in the order of [`LayerSums::begins`], in seconds.
    ///
    /// For a branching model, `inner` has the stages that end at the cut. Without it the result is 0, which is a lower
    /// bound.
    pub(crate) fn sum(&mut self, index: usize, inner: Option<&Inner>) -> f64 {
        if self.model.is_chain {
            for at in self.of_begin.len()..=index {
                // Stages of a chain grow by one layer at their begin, which runs backward last.
                let layers = self.model.layers_between(self.end - at - 1, self.end - at);
                self.of_begin.push(self.tail.extend(layers));
            }
            return self.of_begin[index];
        }
        let Some(inner) = inner else { return 0.0 };
        if self.of_begin.len() <= index {
            self.of_begin.resize(index + 1, f64::NAN);
        }
        // Follow the smaller stages down to one that is known, then compute back up. A loop needs no deep call stack.
        let mut unknown = Vec::new();
        let mut at = index;
        while self.of_begin.get(at).is_some_and(|grad_reduce_s| grad_reduce_s.is_nan()) {
            unknown.push(at);
            at = inner.smaller[at].0 as usize;
        }
        for at in unknown.into_iter().rev() {
            let (smaller, from, to) = inner.smaller[at];
            let left_s = self.of_begin.get(smaller as usize).copied().unwrap_or(0.0);
            self.of_begin[at] = self.tail.behind(left_s, inner.behind[from as usize..to as usize].iter().copied());
        }
        self.of_begin[index]
    }
}

/// Returns the exposed time of every stage that ends at a cut, in the order of [`LayerSums::begins`].
#[cfg(test)]
pub(crate) fn sums_s(model: &LayerSums, totals: &Totals, rate: Rate, overlap: bool, end: usize) -> Vec<f64> {
    let mut sync = Synced::new(model, totals.at_speed(1.0), rate, overlap, end);
    let inner = CutSets::new(model).inner(end);
    (0..model.begins(end).count()).map(|index| sync.sum(index, Some(&inner))).collect()
}
