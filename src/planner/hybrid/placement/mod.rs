//! Devices of stages: all placements that a search considers, plans by pattern, and plans that use as few devices as
//! possible.

pub(crate) mod cut_row;
mod device_lists;
pub(crate) mod packing;
mod pattern_cuts;
pub(crate) mod patterns;
pub(crate) mod placement_space;
