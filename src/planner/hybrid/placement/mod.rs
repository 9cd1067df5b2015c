//! Which devices stages may take: all placements of a search, plans by pattern, and plans that take as few devices as
//! can be.

pub(crate) mod cut_row;
mod device_lists;
pub(crate) mod packing;
mod pattern_cuts;
pub(crate) mod patterns;
pub(crate) mod placement_space;
