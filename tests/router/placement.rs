//! Who owns which expert.

use libtest_mimic::{Failed, Trial};
use moe_kernels::routing::Placement;
use moe_kernels::{Expert, Rank};
use proptest::prelude::*;

use super::{property, refused, same};

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("placement::blocks", blocks),
        Trial::test("placement::any map", any_map),
        Trial::test("placement::bad input", bad_input),
    ]
}

/// Whatever the map: owners as given, local ids and lists that agree with each other.
fn consistent(placement: &Placement, owners: &[Rank], world: usize) -> Result<(), Failed> {
    same("world", placement.world(), world)?;
    same("num_experts", placement.num_experts(), owners.len())?;
    same("owners", placement.owners(), owners)?;
    for rank in (0..world as u32).map(Rank) {
        let want: Vec<Expert> = (0..owners.len()).filter(|&e| owners[e] == rank).map(|e| Expert(e as u32)).collect();
        same("experts_of", placement.experts_of(rank), &want[..])?;
        same("num_local", placement.num_local(rank), want.len())?;
        for (local, &expert) in want.iter().enumerate() {
            same("rank_of", placement.rank_of(expert), Some(rank))?;
            same("local_of", placement.local_of(expert), Some(local))?;
        }
    }
    for beyond in [owners.len() as u32, u32::MAX] {
        same("rank_of beyond", placement.rank_of(Expert(beyond)), None)?;
        same("local_of beyond", placement.local_of(Expert(beyond)), None)?;
    }
    for beyond in [world as u32, u32::MAX] {
        same("experts_of beyond", placement.experts_of(Rank(beyond)), &[])?;
    }
    Ok(())
}

fn blocks() -> Result<(), Failed> {
    for num_experts in [1, 2, 7, 8, 60, 64, 256, 384] {
        for world in (1..=16).filter(|&w| w <= num_experts) {
            let owners: Vec<Rank> = (0..num_experts).map(|e| Rank((e as f64 * world as f64 / num_experts as f64).floor() as u32)).collect();
            let placement = Placement::blocks(num_experts, world)?;
            consistent(&placement, &owners, world)?;
            same("as a map", &Placement::from_map(&owners, world)?, &placement)?;
            let counts = || (0..world as u32).map(|r| placement.num_local(Rank(r)));
            let (least, most) = (counts().min().unwrap(), counts().max().unwrap());
            if least == 0 || most - least > 1 {
                return Err(format!("{num_experts} experts over {world} ranks: {least} to {most} each").into());
            }
        }
    }
    Ok(())
}

fn any_map() -> Result<(), Failed> {
    let maps = (1usize..12).prop_flat_map(|world| (Just(world), prop::collection::vec(0..world as u32, 1..80)));
    property(&maps, |(world, map)| {
        let owners: Vec<Rank> = map.into_iter().map(Rank).collect();
        let placement = Placement::from_map(&owners, world).map_err(|e| TestCaseError::fail(e.to_string()))?;
        consistent(&placement, &owners, world).map_err(|e| TestCaseError::fail(format!("{e:?}")))
    })
}

fn bad_input() -> Result<(), Failed> {
    let max = usize::MAX;
    for (num_experts, world, message) in [
        (0, 1, "placement: num_experts is 0, expected 1 to 65536"),
        (65537, 1, "placement: num_experts is 65537, expected 1 to 65536"),
        (max, max, &format!("placement: num_experts is {max}, expected 1 to 65536")),
        (8, 0, "placement: world is 0, expected 1 to 65536"),
        (8, max, &format!("placement: world is {max}, expected 1 to 65536")),
        (8, 9, "placement: world is 9, expected at most num_experts, 8, unless a map is given"),
    ] {
        refused("blocks", Placement::blocks(num_experts, world), message)?;
    }
    refused("map", Placement::from_map(&[], 1), "placement: num_experts is 0, expected 1 to 65536")?;
    refused("map", Placement::from_map(&[Rank(0)], 0), "placement: world is 0, expected 1 to 65536")?;
    let map = [Rank(0), Rank(2), Rank(1)];
    refused("map", Placement::from_map(&map, 2), "placement: map[1] is rank 2, expected a rank below world, 2")?;
    // A world larger than the number of experts is fine with a map.
    same("a rank without experts", Placement::from_map(&map, 5)?.num_local(Rank(4)), 0)
}
