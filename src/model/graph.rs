//! The layer graph: the measurements of each layer, and which layer feeds which.

use crate::error::{Error, Result};

/// Measurements of one layer at one batch size. Seconds and bytes are for the whole batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Measurement {
    /// Seconds of the forward pass.
    pub forward_s: f64,
    /// Seconds of the backward pass.
    pub backward_s: f64,
    /// Seconds of input gradients and of weight gradients, each run alone. `None` if the profile has no such
    /// measurement.
    pub halves_s: Option<(f64, f64)>,
    /// Bytes of the output, which crosses a cut behind this layer.
    pub activation_bytes: f64,
    /// Bytes of activations kept from forward to backward.
    pub saved_bytes: f64,
}

/// One layer of the model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Layer {
    /// Name for error messages.
    pub name: String,
    /// Identifier that orders layers with equal costs and equal structure. May be empty.
    pub id: String,
    /// Bytes of weights, equal at every batch size.
    pub parameter_bytes: f64,
    /// Bytes of the weights among [`Layer::parameter_bytes`] that are not trained. They have no gradients.
    pub frozen_bytes: f64,
    /// One entry for each of [`Graph::batch_sizes`], in that order.
    pub measured: Vec<Measurement>,
}

/// A trained weight that several layers share.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TiedWeight {
    /// Indices of the layers that share the weight, two or more. The first counts it among its own parameters.
    pub layers: Vec<usize>,
    /// Bytes of the weight.
    pub bytes: f64,
}

/// A directed acyclic graph of layers with their costs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Graph {
    /// Batch sizes at which layers were measured, ascending, at least one.
    pub batch_sizes: Vec<u32>,
    /// Layers in the order of the profile.
    pub layers: Vec<Layer>,
    /// Edges `(from, to)`, as indices into `layers`.
    pub edges: Vec<(usize, usize)>,
    /// Weights that layers share.
    pub tied_weights: Vec<TiedWeight>,
}

impl Layer {
    /// Returns the bytes of weights that are trained, which have gradients and optimizer state.
    #[must_use]
    pub fn trained_bytes(&self) -> f64 {
        self.parameter_bytes - self.frozen_bytes
    }
}

impl Graph {
    /// Checks that every layer is measured at every batch size and that no number is negative or infinite.
    ///
    /// # Errors
    /// Returns [`Error::Profile`] that names the layer and the number.
    pub fn check(&self) -> Result<()> {
        if self.batch_sizes.is_empty() || self.batch_sizes[0] == 0 || !self.batch_sizes.is_sorted_by(|a, b| a < b) {
            return Err(Error::profile(
                format!(
                    "batch sizes are {:?}, but there must be at least one, positive and ascending",
                    self.batch_sizes
                ),
                "list positive batch sizes in ascending order",
            ));
        }
        for layer in &self.layers {
            if layer.measured.len() != self.batch_sizes.len() {
                return Err(Error::profile(
                    format!(
                        "layer `{}` is measured {} times, but the profile has {} batch sizes",
                        layer.name,
                        layer.measured.len(),
                        self.batch_sizes.len()
                    ),
                    "give one measurement for each batch size",
                ));
            }
            let numbers = layer.measured.iter().flat_map(|at| {
                let (input_gradient_s, weight_gradient_s) = at.halves_s.unwrap_or_default();
                [
                    ("forward seconds", at.forward_s),
                    ("backward seconds", at.backward_s),
                    ("input-gradient seconds", input_gradient_s),
                    ("weight-gradient seconds", weight_gradient_s),
                    ("activation bytes", at.activation_bytes),
                    ("saved bytes", at.saved_bytes),
                ]
            });
            let weights = [("parameter bytes", layer.parameter_bytes), ("frozen bytes", layer.frozen_bytes)];
            for (what, number) in numbers.chain(weights) {
                // Costs are summed over layers and multiplied by micro-batches. Below 1e300 the sum of a million such
                // numbers is still finite. The range also excludes NaN.
                if !(0.0..1e300).contains(&number) {
                    return Err(Error::profile(
                        format!("layer `{}` has {number} {what}", layer.name),
                        "write a finite number that is at least 0",
                    ));
                }
            }
            if layer.frozen_bytes > layer.parameter_bytes {
                return Err(Error::profile(
                    format!(
                        "layer `{}` has {} frozen bytes, but {} parameter bytes in all",
                        layer.name, layer.frozen_bytes, layer.parameter_bytes
                    ),
                    "count frozen weights among the parameter bytes",
                ));
            }
        }
        for tie in &self.tied_weights {
            let owned = tie.layers.first().and_then(|&first| self.layers.get(first));
            if owned.is_none_or(|first| !(0.0..=first.trained_bytes()).contains(&tie.bytes)) {
                return Err(Error::profile(
                    format!("layers {:?} share {} bytes, which the first of them does not have", tie.layers, tie.bytes),
                    "add the shared weight to the trained parameter bytes of the first layer",
                ));
            }
        }
        Ok(())
    }

    /// Returns indices of `layers` such that every edge goes forward. Layers that are ready together keep profile
    /// order.
    ///
    /// # Errors
    /// Returns [`Error::Profile`] that names an edge to a missing layer, or the layers of a cycle.
    pub fn topological_order(&self) -> Result<Vec<usize>> {
        let count = self.layers.len();
        let mut waiting = vec![0_usize; count];
        let mut next = vec![Vec::new(); count];
        for &(from, to) in &self.edges {
            if from >= count || to >= count {
                return Err(Error::profile(
                    format!("an edge goes from layer {from} to layer {to}, but there are {count} layers"),
                    "number the layers of edges from 0",
                ));
            }
            waiting[to] += 1;
            next[from].push(to);
        }
        let mut ready: std::collections::BinaryHeap<_> =
            (0..count).filter(|&layer| waiting[layer] == 0).map(std::cmp::Reverse).collect();
        let mut order = Vec::with_capacity(count);
        while let Some(std::cmp::Reverse(layer)) = ready.pop() {
            order.push(layer);
            for &to in &next[layer] {
                waiting[to] -= 1;
                if waiting[to] == 0 {
                    ready.push(std::cmp::Reverse(to));
                }
            }
        }
        if order.len() < count {
            // Layers behind a cycle wait as well, so the list may be long. Eight names are enough for a message.
            let stuck: Vec<&str> = (0..count)
                .filter(|&layer| waiting[layer] > 0)
                .take(8)
                .map(|layer| self.layers[layer].name.as_str())
                .collect();
            return Err(Error::profile(
                format!("layers feed each other in a cycle: {}", stuck.join(", ")),
                "remove the edge that goes back",
            ));
        }
        Ok(order)
    }
}
