//! Lemma *Cuts in groups* (docs/proofs.md#cuts-in-groups), last paragraph: the gradient all-reduce of a stage of a branching
//! model follows from that of a smaller stage.
//!
//! Of the layers between two cuts, the first ones in the order of the model run backward last. With some of them, the inner cut
//! is a cut again. What this smaller stage has left to send is known, and the backwards and messages of these layers follow
//! it. So the sum is the same, in the same order.

use crate::planner::effort::tables;
use std::sync::{Arc, OnceLock};

use rustc_hash::FxHashMap;

use crate::cost::network::Rate;
use crate::cost::{LayerSums, SyncTail, Totals};

/// Cuts of a branching model as sets of layers.
pub(crate) struct CutSets<'a> {
    model: &'a LayerSums,
    /// Layers of each cut as bits, and the cut of each set of layers.
    layers: Vec<Vec<u64>>,
    cut_of: FxHashMap<Vec<u64>, u32>,
    /// Stages that end at each cut, once they are asked for. Empty if they are too many to keep.
    inner: Vec<OnceLock<Arc<Inner>>>,
}

/// Stages of a branching model that end at one cut. Each is a smaller stage and layers that run backward behind all of
/// it.
pub(crate) struct Inner {
    /// For each begin, in the order of [`LayerSums::begins`], the begin of the smaller stage, and the layers behind it
    /// as a range of `behind`. The number of begins stands for no stage.
    smaller: Vec<(u32, u32, u32)>,
    behind: Vec<u32>,
}

impl<'a> CutSets<'a> {
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

    /// Returns whether stages are kept once they are found.
    pub(crate) fn is_kept(&self) -> bool {
        !self.inner.is_empty()
    }

    /// Returns the stages that end at a cut.
    pub(crate) fn inner(&self, end: usize) -> Arc<Inner> {
        match self.inner.get(end) {
            Some(kept) => kept.get_or_init(|| Arc::new(self.found(end))).clone(),
            None => Arc::new(self.found(end)),
        }
    }

    fn found(&self, end: usize) -> Inner {
        let mut inner = Inner { smaller: Vec::new(), behind: Vec::new() };
        let none = self.model.begins_behind(end, 0) + 1;
        let mut grown = Vec::new();
        for begin in self.model.begins(end) {
            let from = inner.behind.len();
            grown.clone_from(&self.layers[begin as usize]);
            let mut next = none;
            // The layers that run backward last are the first of those left: with some of them there is a cut again.
            'whole: for word in 0..grown.len() {
                let mut left = self.layers[end][word] & !grown[word];
                while left != 0 {
                    let layer = left.trailing_zeros();
                    left &= left - 1;
                    grown[word] |= 1 << layer;
                    inner.behind.push(64 * word as u32 + layer);
                    if let Some(&cut) = self.cut_of.get(&grown) {
                        if cut as usize != end {
                            next = self.model.begins_behind(end, cut as usize);
                        }
                        break 'whole;
                    }
                }
            }
            inner.behind[from..].reverse();
            inner.smaller.push((next as u32, from as u32, inner.behind.len() as u32));
        }
        inner
    }
}

/// Exposed gradient reduction of the stages that end at a cut, at one rate and behind backwards of one speed.
pub(crate) struct Synced<'a> {
    model: &'a LayerSums,
    end: usize,
    tail: SyncTail<'a>,
    /// Exposed time of each stage that is known, in the order of [`LayerSums::begins`]. NaN where it is not.
    of_begin: Vec<f64>,
}

impl<'a> Synced<'a> {
    pub(crate) fn new(
        model: &'a LayerSums,
        totals: &'a Totals,
        rate: Rate,
        speed: f64,
        overlap: bool,
        end: usize,
    ) -> Self {
        Self { model, end, tail: SyncTail::new(model, totals, speed, rate, overlap), of_begin: Vec::new() }
    }

    /// Returns the exposed time of the stage with this place in the order of [`LayerSums::begins`]. Without `inner`, it
    /// is 0 for a branching model.
    pub(crate) fn sum(&mut self, index: usize, inner: Option<&Inner>) -> f64 {
        if self.model.is_chain {
            for at in self.of_begin.len()..=index {
                // Each stage is the one before it and more layers.
                let layers = self.model.layers_between(self.end - at - 1, self.end - at);
                self.of_begin.push(self.tail.extend(layers));
            }
            return self.of_begin[index];
        }
        let Some(inner) = inner else { return 0.0 };
        if self.of_begin.len() <= index {
            self.of_begin.resize(index + 1, f64::NAN);
        }
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
    let mut sync = Synced::new(model, totals, rate, 1.0, overlap, end);
    let inner = CutSets::new(model).inner(end);
    (0..model.begins(end).count()).map(|index| sync.sum(index, Some(&inner))).collect()
}
