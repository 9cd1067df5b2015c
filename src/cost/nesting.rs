//! Nesting of cuts, and the layers between two of them.

use crate::model::states::CutPoints;

/// Nesting of cuts. Layers are positions in topological order.
#[derive(Debug, Clone)]
pub(super) enum Nesting {
    /// Every cut contains the one before it, so one sequence of layers represents all cuts in linear memory.
    Row {
        /// Layers, sorted by the first cut that contains them.
        layers: Vec<u32>,
        /// Number, for each cut, of elements of `layers` that are below it.
        below: Vec<u32>,
        /// Whether `layers` is in topological order.
        in_order: bool,
    },
    /// Cuts of a branching graph, not all of which contain each other.
    Listed {
        /// Cuts strictly inside each cut, largest first.
        begins: Vec<Vec<u32>>,
        /// Layers below each cut, ascending.
        below: Vec<Vec<u32>>,
    },
}

// `begins` descends, because a stage is built from its end towards the input and the smallest stage is tried first.
impl Nesting {
    pub(super) fn of(states: &CutPoints) -> Self {
        let order = states.order();
        let cuts = states.len();
        if let Some(enters) = states.enters() {
            let mut layers: Vec<u32> = (0..order.len() as u32).collect();
            // The sort is stable: layers that enter at the same cut stay in topological order.
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

    /// Returns for each cut whether `layer` is below it.
    pub(super) fn is_below(&self, layer: u32) -> Vec<bool> {
        match self {
            Self::Row { layers, below, .. } => {
                let place = layers.iter().position(|&other| other == layer);
                below.iter().map(|&below| place.is_some_and(|place| place < below as usize)).collect()
            }
            Self::Listed { below, .. } => below.iter().map(|layers| layers.binary_search(&layer).is_ok()).collect(),
        }
    }

    /// Sums `each`, one value per layer in topological order, over the layers below each cut.
    pub(super) fn sums_below(&self, each: &[f64]) -> Vec<f64> {
        match self {
            Self::Row { layers, below, .. } => {
                // Each cut continues the sum of the one before it, so the time is linear in layers and cuts.
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

/// A descending sequence of cuts where a stage may begin, or of layers. The variants avoid an allocation where
/// possible.
#[derive(Debug, Clone)]
pub enum Descending<'a> {
    /// A range of numbers.
    Range(std::iter::Rev<std::ops::Range<u32>>),
    /// A borrowed list of numbers.
    Some(std::iter::Copied<std::slice::Iter<'a, u32>>),
    /// An owned list of numbers.
    Made(std::vec::IntoIter<u32>),
    /// The elements of an ascending list that are not in another one, from the last.
    Between {
        /// The list whose elements are returned.
        outer: &'a [u32],
        /// The excluded elements, ascending. All of them must be in `outer`.
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
                // Both lists ascend and `inner` is a subset, so the two last elements decide without a search.
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
