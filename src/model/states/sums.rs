//! Sums over the layers of each state, and what crosses the cut behind it.

use super::set::BitSet;
use crate::control::Control;
use crate::error::Result;
use crate::model::graph::Graph;

/// Sums over the layers of one down-set, at one of the profile's batch sizes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CutSums {
    /// Forward seconds.
    pub forward_s: f64,
    /// Backward seconds.
    pub backward_s: f64,
    /// Bytes of weights.
    pub parameter_bytes: f64,
    /// Bytes kept from forward to backward.
    pub saved_bytes: f64,
    /// Outputs that layers outside read: what crosses the cut behind this down-set.
    pub boundary_bytes: f64,
}

/// Sums over the layers of each state. They are added up in topological order, so that a stage costs the same to the last
/// digit whatever the other states are.
pub(super) fn totals_of(
    graph: &Graph,
    wires: &LayerReaders,
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
            if wires.after[position].iter().any(|&reader| !is_inside(state, reader)) {
                add_boundary(&mut sums, graph, order[position]);
            }
        }
        totals.extend(sums);
    }
    Ok(totals)
}

/// The same for states that hold ever longer beginnings of the order, each layer from the state on that `enters` says.
pub(super) fn totals_in_order(
    graph: &Graph,
    order: &[usize],
    wires: &LayerReaders,
    enters: &[u32],
    states: usize,
    control: &Control,
) -> Result<Vec<CutSums>> {
    let mut entering = (0..order.len()).peekable();
    let mut sums = vec![CutSums::default(); graph.batch_sizes.len()];
    let mut totals = Vec::with_capacity(states * sums.len());
    // Positions inside that a layer outside may read.
    let mut open: Vec<usize> = Vec::new();
    for state in 0..states {
        control.check()?;
        let is_inside = |position: usize| enters[position] as usize <= state;
        while let Some(position) = entering.next_if(|&position| is_inside(position)) {
            add(&mut sums, graph, order[position]);
            open.push(position);
        }
        open.retain(|&position| wires.after[position].iter().any(|&reader| !is_inside(reader)));
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

/// Adds a layer's output to what crosses a cut at each batch size.
fn add_boundary(sums: &mut [CutSums], graph: &Graph, layer: usize) {
    for (sum, measured) in sums.iter_mut().zip(&graph.layers[layer].measured) {
        sum.boundary_bytes += measured.activation_bytes;
    }
}

/// Who reads whose output, by position in the topological order, each neighbour once.
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
        let mut wires = Self { before: vec![Vec::new(); order.len()], after: vec![Vec::new(); order.len()] };
        for &(from, to) in &graph.edges {
            wires.after[position[from]].push(position[to]);
            wires.before[position[to]].push(position[from]);
        }
        for ends in wires.before.iter_mut().chain(&mut wires.after) {
            ends.sort_unstable();
            ends.dedup();
        }
        wires
    }

    /// Whether a layer outside `set` reads what the layer at `position` puts out.
    pub(super) fn crosses(&self, position: usize, set: &BitSet) -> bool {
        self.after[position].iter().any(|&reader| !set.contains(reader))
    }
}
