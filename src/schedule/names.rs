//! Lookup of schedule families by name.

use super::Schedule;
use super::request::Request;
use super::{FAMILIES, Family};
use crate::error::{Error, Result};

/// Returns the family called `name`.
///
/// # Errors
/// [`Error::Schedule`] if there is no such family. The hint names up to three families with the most similar names.
pub fn family(name: &str) -> Result<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
        // Compare without case and separators: "ZB-V", "zbv" and "zb_v" are the same name to a user.
        let letters = |name: &str| name.to_lowercase().replace(['_', '-', ' '], "");
        let mut near: Vec<(usize, &str)> =
            FAMILIES.iter().map(|family| (edits(&letters(name), &letters(family.name)), family.name)).collect();
        let min = near.iter().map(|&(edits, _)| edits).min().unwrap_or_default();
        // More than three edits is rarely a typing error in names this short, so such a suggestion would mislead.
        near.retain(|&(edits, _)| edits == min && edits <= 3);
        let hint = match near.as_slice() {
            [] => "`hpgo schedules` lists them all".to_owned(),
            near => {
                let names: Vec<String> = near.iter().take(3).map(|(_, name)| format!("`{name}`")).collect();
                format!("did you mean {}? `hpgo schedules` lists them all", names.join(" or "))
            }
        };
        Error::schedule(format!("there is no schedule `{name}`"), hint)
    })
}

/// Returns the number of letters to insert, delete or replace between two words (Levenshtein, 1966).
fn edits(from: &str, to: &str) -> usize {
    // One row of the edit-distance table is enough: each row needs only the row before and one diagonal entry.
    let mut row: Vec<usize> = (0..=to.chars().count()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.chars().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[row.len() - 1]
}

/// Builds the schedule of family `name` for `request`.
///
/// ```
/// use hpgo::schedule::{Request, build};
///
/// let schedule = build("interleaved", &Request { virtual_stages_per_rank: Some(3), ..Request::new(4, 8) })?;
/// assert_eq!(schedule.stages(), 12);
/// assert_eq!(build("dualpipe", &Request::new(4, 6)).unwrap_err().hint(), "it needs p even, M even and at least 2 p");
/// # Ok::<(), hpgo::Error>(())
/// ```
///
/// # Errors
/// [`Error::Schedule`] if there is no such family, [`Error::Argument`] if the request violates its limits.
pub fn build(name: &str, request: &Request) -> Result<Schedule> {
    family(name)?.build(request)
}
