//! Sums over the layers of each state, and the bytes that cross the cut behind it.

use super::set::BitSet;
use crate::control::Control;
use crate::error::Result;
use crate::model::graph::Graph;

/// Sums over the layers of one down-set, at one of the profile's batch sizes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CutSums {
    /// Seconds of forward passes.
    pub forward_s: f64,
    /// Seconds of backward passes.
    pub backward_s: f64,
    /// Bytes of all weights.
    pub parameter_bytes: f64,
    /// Bytes of activations kept from forward to backward.
    pub saved_bytes: f64,
    /// Bytes of outputs that layers outside read: they cross the cut behind this down-set.
    pub boundary_bytes: f64,
}

/// Sums over the layers of each state, in topological order, so that a stage has exactly the same cost for every set of
/// states that contains it.
pub(super) fn totals_of(
    graph: &Graph,
    readers: &LayerReaders,
    order: &[usize],
    states: usize,
    is_inside: impl Fn(usize, usize) -> bool,
    control: &Control,
) -> Result<Vec<CutSums>> {
    let batch_sizes = graph.batch_sizes.len();
    let mut totals = Vec::with_capacity(states * batch_sizes);
    for state in 0..states {
        control.check()?;
        let mut sums = vec![CutSums::default(); batch_sizes];
        for position in (0..order.len()).filter(|&position| is_inside(state, position)) {
            add(&mut sums, graph, order[position]);
            if readers.after[position].iter().any(|&reader| !is_inside(state, reader)) {
                add_boundary(&mut sums, graph, order[position]);
            }
        }
        totals.extend(sums);
    }
    Ok(totals)
}

/// Like [`totals_of`], for states that are prefixes of the order: each layer is in the states from number `enters` on.
pub(super) fn totals_in_order(
    graph: &Graph,
    order: &[usize],
    readers: &LayerReaders,
    enters: &[u32],
    states: usize,
    control: &Control,
) -> Result<Vec<CutSums>> {
    let mut entering = (0..order.len()).peekable();
    let mut sums = vec![CutSums::default(); graph.batch_sizes.len()];
    let mut totals = Vec::with_capacity(states * sums.len());
    // Positions inside whose output a layer outside may still read. Testing only these keeps the pass linear for
    // chains.
    let mut open: Vec<usize> = Vec::new();
    for state in 0..states {
        control.check()?;
        let is_inside = |position: usize| enters[position] as usize <= state;
        while let Some(position) = entering.next_if(|&position| is_inside(position)) {
            add(&mut sums, graph, order[position]);
            open.push(position);
        }
        open.retain(|&position| readers.after[position].iter().any(|&reader| !is_inside(reader)));
        // The boundary is summed again for each state. Subtracting outputs that close would leave rounding errors.
        for sum in &mut sums {
            sum.boundary_bytes = 0.0;
        }
        for &position in &open {
            add_boundary(&mut sums, graph, order[position]);
        }
        totals.extend_from_slice(&sums);
    }
    Ok(totals)
}

/// Adds a layer to the sums at each batch size.
fn add(sums: &mut [CutSums], graph: &Graph, layer: usize) {
    let layer = &graph.layers[layer];
    for (sum, measured) in sums.iter_mut().zip(&layer.measured) {
        sum.forward_s += measured.forward_s;
        sum.backward_s += measured.backward_s;
        sum.parameter_bytes += layer.parameter_bytes;
        sum.saved_bytes += measured.saved_bytes;
    }
}

/// Adds the output of a layer to the boundary bytes at each batch size.
fn add_boundary(sums: &mut [CutSums], graph: &Graph, layer: usize) {
    for (sum, measured) in sums.iter_mut().zip(&graph.layers[layer].measured) {
        sum.boundary_bytes += measured.activation_bytes;
    }
}

/// Readers and feeders of each layer, by position in the topological order, each neighbor once.
#[derive(Debug)]
pub(crate) struct LayerReaders {
    pub(crate) before: Vec<Vec<usize>>,
    pub(crate) after: Vec<Vec<usize>>,
}

impl LayerReaders {
    pub(super) fn of(graph: &Graph, order: &[usize]) -> Self {
        let mut position = vec![0; order.len()];
        for (at, &layer) in order.iter().enumerate() {
            position[layer] = at;
        }
        let mut readers = Self { before: vec![Vec::new(); order.len()], after: vec![Vec::new(); order.len()] };
        for &(from, to) in &graph.edges {
            readers.after[position[from]].push(position[to]);
            readers.before[position[to]].push(position[from]);
        }
        // A profile may list an edge twice, but the output of a layer crosses a cut once.
        for ends in readers.before.iter_mut().chain(&mut readers.after) {
            ends.sort_unstable();
            ends.dedup();
        }
        readers
    }

    /// Returns whether a layer outside `set` reads the output of the layer at `position`.
    pub(super) fn crosses(&self, position: usize, set: &BitSet) -> bool {
        self.after[position].iter().any(|&reader| !set.contains(reader))
    }
}
