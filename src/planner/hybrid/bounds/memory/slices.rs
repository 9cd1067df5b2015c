//! Slices of all cuts of a branching model: bounds on the memory below their cuts, without a list of cuts.
//!
//! The *progress* of a cut is the share of all weights below it plus the share of all saved activations below it. A
//! slice stands for all cuts of about equal progress. docs/proofs.md, *Memory*, proves the bounds.

use crate::cost::{LayerSums, Totals};
use crate::model::lineage::Lineage;
use crate::model::states::BitSet;
use crate::planner::effort::bounds;

/// Tolerance for sums in another order, as a share of the whole model.
const ROUNDING: f64 = 1e-9;

/// Bounds on the weights below cuts of one progress, as shares of the whole model.
#[derive(Debug, Clone, Copy, Default)]
struct Corner {
    progress: f64,
    /// Smallest share of all weights below such a cut.
    min_weights: f64,
    /// Largest share of all weights below such a cut.
    max_weights: f64,
}

/// Slices of cuts, by rising progress. The first one has only the empty cut, and the last one only the full cut.
pub(crate) struct Slices {
    /// Weights of the whole model.
    weights_bytes: f64,
    /// Saved activations of each layer at the smallest batch size of the profile. Other sizes are rounded down to the
    /// proportions of this one.
    layer_saved_bytes: Vec<f64>,
    /// Bounds at the lower end of each slice.
    begins: Vec<Corner>,
    /// Bounds at the upper end of each slice.
    ends: Vec<Corner>,
}

impl Slices {
    /// Returns [`bounds::SLICES`] slices of equal width, apart from the first and the last.
    pub(crate) fn new(model: &LayerSums, lineage: &Lineage) -> Self {
        let weights = &model.layer_parameter_bytes;
        let layer_saved_bytes = model.totals(model.batch_sizes()[0]).layer_saved_bytes;
        let weights_bytes: f64 = weights.iter().sum();
        let all_saved_bytes: f64 = layer_saved_bytes.iter().sum();
        let share = |bytes: f64, all_bytes: f64| if all_bytes > 0.0 { bytes / all_bytes } else { 0.0 };
        // Pairs of a layer's share of the weights, and its progress.
        let layers: Vec<(f64, f64)> = (weights.iter().zip(&layer_saved_bytes))
            .map(|(&weights, &saved)| {
                let weights = share(weights, weights_bytes);
                (weights, weights + share(saved, all_saved_bytes))
            })
            .collect();
        let whole: f64 = layers.iter().map(|&(_, progress)| progress).sum();
        let sum = |set: &BitSet| set.iter().map(|layer| layers[layer].1).sum::<f64>();
        // A layer is below a cut only together with all layers before it, and above a cut only together with all layers
        // behind it. So below `min_with` it is above every cut, and above `max_without` it is below every cut.
        let min_with: Vec<f64> = lineage.before.iter().map(sum).collect();
        let max_without: Vec<f64> = lineage.behind.iter().map(|set| whole - sum(set)).collect();
        let mut by_weights: Vec<usize> = (0..layers.len()).filter(|&layer| layers[layer].1 > 0.0).collect();
        by_weights.sort_by(|&a, &b| (layers[a].0 / layers[a].1).total_cmp(&(layers[b].0 / layers[b].1)));
        // Slices overlap a little, so that rounding puts no cut between two of them.
        let slack = ROUNDING * whole;
        let inner = bounds::SLICES - 2;
        let width = whole / inner as f64;
        let (mut begins, mut ends) = (vec![Corner::default()], vec![Corner::default()]);
        for slice in 0..inner {
            let (begin, end) = (slice as f64 * width - slack, (slice + 1) as f64 * width + slack);
            let is_in = |layer: usize| max_without[layer] < begin;
            let is_open = |layer: usize| !is_in(layer) && min_with[layer] <= end;
            let mut held = (0.0, 0.0);
            for layer in (0..layers.len()).filter(|&layer| is_in(layer)) {
                held = (held.0 + layers[layer].0, held.1 + layers[layer].1);
            }
            // Fill the open layers greedily up to the progress, by rising or by falling weights per progress. As
            // fractions of layers count, no cut has less, or more, weights below it.
            let corner = |progress: f64| {
                let fill = |order: &mut dyn Iterator<Item = usize>| {
                    let mut left = (progress - held.1).max(0.0);
                    let mut weights = held.0;
                    for layer in order.filter(|&layer| is_open(layer)) {
                        let (of_layer, step) = layers[layer];
                        let part = (left / step).min(1.0);
                        weights += part * of_layer;
                        left -= part * step;
                        if left <= 0.0 {
                            return (weights, 0.0);
                        }
                    }
                    (weights, left)
                };
                let (min_weights, unfilled) = fill(&mut by_weights.iter().copied());
                let (max_weights, _) = fill(&mut by_weights.iter().rev().copied());
                Corner { progress: progress.max(held.1) - unfilled, min_weights, max_weights }
            };
            begins.push(corner(begin.max(0.0)));
            ends.push(corner(end.min(whole)));
        }
        let whole = Corner {
            progress: whole,
            min_weights: share(weights_bytes, weights_bytes),
            max_weights: share(weights_bytes, weights_bytes),
        };
        begins.push(whole);
        ends.push(whole);
        Self { weights_bytes, layer_saved_bytes, begins, ends }
    }

    /// Returns the number of slices.
    pub(crate) fn count(&self) -> usize {
        self.begins.len()
    }

    /// Returns a lower bound on the activations that all layers save, in the proportions of the smallest batch size of
    /// the profile. `totals` has the sums for the samples of a replica.
    fn saved_bytes(&self, totals: &Totals) -> f64 {
        let ratios = totals.layer_saved_bytes.iter().zip(&self.layer_saved_bytes);
        let ratios = ratios.filter(|&(_, &first)| first > 0.0).map(|(bytes, first)| bytes / first);
        let min_ratio = ratios.fold(f64::INFINITY, f64::min);
        if min_ratio.is_finite() { min_ratio * self.layer_saved_bytes.iter().sum::<f64>() } else { 0.0 }
    }

    /// Returns a lower and an upper bound, for each slice, on the bytes that all layers below its cuts hold.
    ///
    /// Each byte of weights counts `of_weight` bytes, and each saved byte of a replica with these `totals` counts
    /// `of_saved`. The upper bounds never fall from slice to slice.
    pub(crate) fn held_bytes(&self, of_weight: f64, of_saved: f64, totals: &Totals) -> (Vec<f64>, Vec<f64>) {
        let weights_bytes = of_weight * self.weights_bytes;
        let saved_bytes = of_saved * self.saved_bytes(totals);
        // Progress is the sum of both shares. So at a given progress, more weights mean fewer activations.
        let more_bytes = weights_bytes - saved_bytes;
        let at = |corner: &Corner, weights: f64| saved_bytes * corner.progress + more_bytes * weights;
        let min_bytes = (self.begins.iter())
            .map(|corner| at(corner, if more_bytes > 0.0 { corner.min_weights } else { corner.max_weights }))
            .collect();
        let max_bytes = (self.ends.iter()).scan(0.0_f64, |max, corner| {
            *max = max.max(at(corner, if more_bytes > 0.0 { corner.max_weights } else { corner.min_weights }));
            Some(*max)
        });
        (min_bytes, max_bytes.collect())
    }
}
