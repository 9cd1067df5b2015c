//! Pairs of layers of a branching graph that every cut keeps in one order.

use super::graph::Graph;
use super::order;
use super::states::BitSet;
use crate::error::Result;

/// Maximum number of layers for which the lineage is computed. It needs two bits for each pair of layers. Not tuned.
const MAX_LAYERS: usize = 4_000;

/// The layers that every cut puts on the same side as a given layer, by position in topological order.
#[derive(Debug, Clone)]
pub struct Lineage {
    /// Layers that are below every cut that the layer is below: itself and all layers that feed it, also indirectly.
    pub(crate) before: Vec<BitSet>,
    /// Layers that are above every cut that the layer is above: itself and all layers that read from it, also
    /// indirectly.
    pub(crate) behind: Vec<BitSet>,
}

impl Lineage {
    /// Returns the lineage of a branching graph.
    ///
    /// `None` if no two layers are independent, since then the cuts are a chain, or if there are too many layers.
    ///
    /// # Errors
    /// Returns [`crate::Error::Profile`] for an edge to a missing layer or a cycle.
    pub fn of(graph: &Graph) -> Result<Option<Self>> {
        let order = order::of(graph)?;
        let layers = order.len();
        if layers > MAX_LAYERS {
            return Ok(None);
        }
        let mut position = vec![0; layers];
        for (at, &layer) in order.iter().enumerate() {
            position[layer] = at;
        }
        let mut edges: Vec<(usize, usize)> =
            graph.edges.iter().map(|&(from, to)| (position[from], position[to])).collect();
        edges.sort_unstable();
        let alone = |layer: usize| {
            let mut set = BitSet::empty(layers);
            set.insert(layer);
            set
        };
        let mut lineage = Self { before: (0..layers).map(alone).collect(), behind: (0..layers).map(alone).collect() };
        // Edges go forward, so sorted by their end, the edges into a layer precede the edges out of it. One pass over
        // the sorted edges is therefore enough for the transitive closure, forward for `before` and backward for
        // `behind`.
        for &(from, to) in edges.iter().rev() {
            lineage.behind[from] = lineage.behind[from].union(&lineage.behind[to]);
        }
        edges.sort_unstable_by_key(|&(from, to)| (to, from));
        for &(from, to) in &edges {
            lineage.before[to] = lineage.before[to].union(&lineage.before[from]);
        }
        // Both sets contain the layer itself, hence the 1. A layer related to all others is on every path.
        let related = |layer: usize| (lineage.before[layer].count() + lineage.behind[layer].count()) as usize - 1;
        Ok((0..layers).any(|layer| related(layer) < layers).then_some(lineage))
    }
}
