//! Which cuts are inside which others, and which layers are between two of them.

use crate::model::states::CutPoints;

/// Layers, as positions in topological order.
#[derive(Debug, Clone)]
pub(super) enum Nesting {
    /// Every cut contains the one before it.
    Row {
        /// Each layer behind those that are below an earlier cut.
        layers: Vec<u32>,
        /// For each cut, how many of them are below it.
        below: Vec<u32>,
        /// Whether that is topological order.
        in_order: bool,
    },
    Listed {
        /// For each cut, the cuts strictly inside it, largest first.
        begins: Vec<Vec<u32>>,
        /// For each cut, its layers, ascending.
        below: Vec<Vec<u32>>,
    },
}

impl Nesting {
    pub(super) fn of(states: &CutPoints) -> Self {
        let order = states.order();
        let cuts = states.len();
        if let Some(enters) = states.enters() {
            let mut layers: Vec<u32> = (0..order.len() as u32).collect();
            layers.sort_by_key(|&layer| enters[layer as usize]);
            let below = |cut: usize| layers.partition_point(|&layer| enters[layer as usize] as usize <= cut) as u32;
            return Self::Row { below: (0..cuts).map(below).collect(), in_order: layers.is_sorted(), layers };
        }
        let mut position = vec![0_u32; order.len()];
        for (at, &layer) in (0_u32..).zip(order) {
            position[layer] = at;
        }
        let below = |cut| states.layers_between(0, cut).iter().map(|&layer| position[layer]).collect();
        let inside = |end: usize| (0..end).rev().filter(move |&begin| states.is_subset(begin, end));
        Self::Listed {
            begins: (0..cuts).map(|end| inside(end).map(|begin| begin as u32).collect()).collect(),
            below: (0..cuts).map(below).collect(),
        }
    }

    /// For each cut, whether a layer is below it.
    pub(super) fn is_below(&self, layer: u32) -> Vec<bool> {
        match self {
            Self::Row { layers, below, .. } => {
                let place = layers.iter().position(|&other| other == layer);
                below.iter().map(|&below| place.is_some_and(|place| place < below as usize)).collect()
            }
            Self::Listed { below, .. } => below.iter().map(|layers| layers.binary_search(&layer).is_ok()).collect(),
        }
    }

    /// For each cut, the sum over the layers below it of what each layer has, in topological order.
    pub(super) fn sums_below(&self, each: &[f64]) -> Vec<f64> {
        match self {
            Self::Row { layers, below, .. } => {
                let (mut sum, mut summed) = (0.0, 0);
                (below.iter())
                    .map(|&below| {
                        sum += layers[summed..below as usize].iter().map(|&layer| each[layer as usize]).sum::<f64>();
                        summed = below as usize;
                        sum
                    })
                    .collect()
            }
            Self::Listed { below, .. } => {
                below.iter().map(|layers| layers.iter().map(|&layer| each[layer as usize]).sum()).collect()
            }
        }
    }
}

/// Cuts where a stage may begin, or layers: a range of them, or a list.
#[derive(Debug, Clone)]
pub enum Descending<'a> {
    /// All below a number.
    Range(std::iter::Rev<std::ops::Range<u32>>),
    /// These.
    Some(std::iter::Copied<std::slice::Iter<'a, u32>>),
    /// These, made for the purpose.
    Made(std::vec::IntoIter<u32>),
    /// Those of an ascending list that are not in another one.
    Between {
        /// The list.
        outer: &'a [u32],
        /// The other one, all of whose items are in the first.
        inner: &'a [u32],
    },
}

impl Iterator for Descending<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        match self {
            Self::Range(range) => range.next(),
            Self::Some(items) => items.next(),
            Self::Made(items) => items.next(),
            Self::Between { outer, inner } => {
                while let Some((&last, others)) = outer.split_last() {
                    *outer = others;
                    match inner.split_last() {
                        Some((&other, others)) if other == last => *inner = others,
                        _ => return Some(last),
                    }
                }
                None
            }
        }
    }
}
