//! Which layers of a branching graph run before or behind each other, whatever its cuts.

use super::graph::Graph;
use super::order;
use super::states::BitSet;
use crate::error::Result;

/// Layers of a graph whose lineage is worth the memory: two bits for each pair of layers. Not tuned.
const MAX_LAYERS: usize = 4_000;

/// For each layer, as position in topological order, the layers that every cut puts on the same side, itself included.
#[derive(Debug, Clone)]
pub struct Lineage {
    /// Those that are below each cut that the layer is below.
    pub(crate) before: Vec<BitSet>,
    /// Those that are behind each cut that the layer is behind.
    pub(crate) behind: Vec<BitSet>,
}

impl Lineage {
    /// Returns the lineage of a branching graph. `None` if no two layers are independent, or if there are too many layers.
    ///
    /// # Errors
    /// [`crate::Error::Profile`] for an edge to a missing layer, or a cycle.
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
        // Edges go forward, so those into a layer come before those out of it when sorted by where they end.
        for &(from, to) in edges.iter().rev() {
            lineage.behind[from] = lineage.behind[from].union(&lineage.behind[to]);
        }
        edges.sort_unstable_by_key(|&(from, to)| (to, from));
        for &(from, to) in &edges {
            lineage.before[to] = lineage.before[to].union(&lineage.before[from]);
        }
        let related = |layer: usize| (lineage.before[layer].count() + lineage.behind[layer].count()) as usize - 1;
        Ok((0..layers).any(|layer| related(layer) < layers).then_some(lineage))
    }
}
