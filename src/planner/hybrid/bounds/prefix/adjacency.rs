//! Where a stage is placed relative to the stage behind it.
//!
//! Lemma *Links, wherever stages lie* (docs/proofs.md) bounds the transfer of each case from below. Of the nodes, a table
//! knows only how many devices are free on the node of the stage behind the cut (`free_case`).

use super::replica_buckets::ReplicaBucket;
use crate::cost::network::Rate;
use crate::planner::hybrid::bounds::link_bounds::{Links, least};

/// Where a stage of a bucket is placed relative to the stage behind it, with the shortest transfer and all-reduce.
pub(super) struct StageAdjacency {
    /// Placement case that the stage behind must give, and the one that this stage gives to the stage in front of it.
    pub(super) behind: usize,
    pub(super) own: usize,
    pub(super) transfer: Rate,
    pub(super) sync: Rate,
}

impl ReplicaBucket {
    pub(super) fn span(&self) -> (u32, u32) {
        (self.fewest, self.most)
    }

    /// Returns the adjacencies of the bucket. With a single placement case they are merged into one that is as good as
    /// each.
    pub(super) fn ways(&self, links: &Links, placement_cases: usize) -> Vec<StageAdjacency> {
        let span = self.span();
        let all = (1, links.spans.last().map_or(1, |span| span.1));
        let mut ways = Vec::new();
        for own in links.spreads(span) {
            let sync = links.sum_spread(own);
            ways.extend(links.any_spread(own).map(|transfer| StageAdjacency { behind: 0, own: 0, transfer, sync }));
            ways.push(StageAdjacency { behind: 1, own: 0, transfer: links.one_and_spread(all, own), sync });
        }
        if links.fits_one(span) {
            let sync = links.sum_in_one(span);
            let own = 1 + (links.widest - span.0) as usize;
            if links.machines > 1 {
                // The last stage may lie there when none is spread.
                let transfer = links.one_and_any_spread(span).unwrap_or_else(|| links.apart());
                ways.push(StageAdjacency { behind: 0, own, transfer, sync });
                ways.push(StageAdjacency { behind: 1, own, transfer: links.apart(), sync });
            } else {
                ways.push(StageAdjacency { behind: 0, own, transfer: links.beside(span, all), sync });
            }
            for room in span.0..links.widest {
                let (behind, own) = (1 + room as usize, 1 + (room - span.0) as usize);
                ways.push(StageAdjacency { behind, own, transfer: links.beside(span, all), sync });
            }
        }
        if placement_cases > 1 {
            return ways;
        }
        let both = |way: StageAdjacency, other: StageAdjacency| StageAdjacency {
            behind: 0,
            own: 0,
            transfer: least(way.transfer, other.transfer),
            sync: least(way.sync, other.sync),
        };
        ways.into_iter().reduce(both).map(|way| StageAdjacency { behind: 0, own: 0, ..way }).into_iter().collect()
    }
}
