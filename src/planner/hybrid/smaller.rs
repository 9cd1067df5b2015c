//! Stages of a branching model, each a smaller one and layers that run backward behind it: what there is to sum of one
//! follows from the other.

use rustc_hash::FxHashMap;

use crate::cost::Model;

/// Cuts of a branching model as sets of layers.
pub(super) struct Sets<'a> {
    model: &'a Model,
    /// For each cut its layers, a bit each, and the cut of such layers.
    layers: Vec<Vec<u64>>,
    cut_of: FxHashMap<Vec<u64>, u32>,
}

/// Stages of a branching model that end at one cut: each is a smaller one and layers that run backward behind all of it.
pub(super) struct Inner {
    /// For each begin, in the order of [`Model::begins`], which other one has the smaller stage, and the layers behind it,
    /// as a range of `behind`; the number of begins stands for no stage.
    pub smaller: Vec<(usize, usize, usize)>,
    pub behind: Vec<u32>,
}

impl<'a> Sets<'a> {
    pub(super) fn new(model: &'a Model) -> Self {
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
        Self { model, layers, cut_of }
    }

    pub(super) fn inner(&self, end: usize) -> Inner {
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
            inner.smaller.push((next, from, inner.behind.len()));
        }
        inner
    }
}
