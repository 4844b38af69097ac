//! How topics made by a send come to every broker of their cluster.

use super::*;
use crate::namesrv::offer::{self, Offer};

/// A registration as a broker of this program sends it; topics come with the time of a mark.
struct Told<'a> {
    kind: &'static str,
    asks: bool,
    gone: &'a str,
    topics: &'a [(&'a str, i32, Option<i64>)],
}

const WHOLE: Told<'static> = Told {
    kind: offer::TABLE_WHOLE,
    asks: true,
    gone: "",
    topics: &[],
};
const PART: Told<'static> = Told {
    kind: offer::TABLE_PART,
    ..WHOLE
};

impl Peer {
    fn tell(&mut self, broker: &Broker, told: &Told<'_>) -> Vec<String> {
        self.now_ms += 1;
        let names: Vec<(&str, i32)> = told
            .topics
            .iter()
            .map(|(name, perm, _)| (*name, *perm))
            .collect();
        let mut body: Value = serde_json::from_slice(&register_body(self.now_ms, &names)).unwrap();
        let table = &mut body["topicConfigSerializeWrapper"]["topicConfigTable"];
        for (name, _, created_ms) in told.topics {
            if let Some(created_ms) = created_ms {
                table[*name]["attributes"][offer::CREATED_ATTRIBUTE] =
                    json!(created_ms.to_string());
            }
        }
        let mut ext = broker.ext();
        ext.push((offer::TABLE_FIELD, told.kind));
        ext.push((offer::ASK_FIELD, if told.asks { "true" } else { "false" }));
        if !told.gone.is_empty() {
            ext.push((offer::GONE_FIELD, told.gone));
        }
        let body = serde_json::to_vec(&body).unwrap();
        let code = request::REGISTER_BROKER;
        offered(&self.call_as(broker.connection, NEW, code, &ext, &body))
    }

    fn ask(&mut self, broker: &Broker) -> Vec<String> {
        let ext = [
            ("clusterName", "DefaultCluster"),
            ("brokerAddr", broker.address),
            ("brokerName", broker.name),
            (offer::ASK_FIELD, "true"),
        ];
        let code = request::BROKER_HEARTBEAT;
        offered(&self.call_as(broker.connection, NEW, code, &ext, &[]))
    }
}

fn offered(got: &Got) -> Vec<String> {
    assert_eq!(got.code, 0, "{got:?}");
    let text = got.ext.get(offer::OFFER_FIELD).expect("an offer, if empty");
    offer::read_offers(text).map(|offer| offer.topic).collect()
}

fn both() -> Peer {
    let mut peer = Peer::new(NameServerConfig::default());
    assert!(peer.tell(&a(), &WHOLE).is_empty());
    assert!(peer.tell(&b(), &WHOLE).is_empty());
    peer
}

#[test]
fn a_topic_made_by_a_send_is_offered_to_the_other_broker_until_it_has_it() {
    let mut peer = both();
    let made = [("T", 6, Some(1_000)), ("by_hand", 6, None)];
    let part = Told {
        topics: &made,
        ..PART
    };
    assert!(peer.tell(&a(), &part).is_empty(), "its own are not offered");
    assert_eq!(peer.ask(&b()), ["T"]);
    assert!(peer.ask(&b()).is_empty(), "told once in a period");
    assert_eq!(
        peer.tell(&b(), &WHOLE),
        ["T"],
        "and again if it was not made"
    );
    let has = Told {
        topics: &[("T", 6, Some(1_000))],
        ..PART
    };
    assert!(peer.tell(&b(), &has).is_empty());
    assert!(peer.tell(&b(), &WHOLE).is_empty());
}

#[test]
fn an_offer_names_queues_flags_and_time() {
    let mut peer = both();
    peer.tell(
        &a(),
        &Told {
            topics: &[("T", 6, Some(77))],
            ..PART
        },
    );
    let offers = peer
        .server
        .table
        .offers_for("DefaultCluster", "broker-b", true);
    let expected = Offer {
        topic: "T".into(),
        read_queue_nums: 4,
        write_queue_nums: 4,
        topic_sys_flag: 0,
        created_ms: 77,
    };
    assert_eq!(offers, [expected]);
}

#[test]
fn what_an_administrator_made_or_changed_anywhere_is_not_offered() {
    let mut peer = both();
    let third = Broker::master("broker-c", "10.0.0.3:10911", 3);
    peer.tell(
        &a(),
        &Told {
            topics: &[("T", 6, Some(5)), ("U", 6, None)],
            ..PART
        },
    );
    peer.tell(
        &b(),
        &Told {
            topics: &[("T", 6, None), ("U", 6, Some(5))],
            ..PART
        },
    );
    assert!(peer.tell(&third, &WHOLE).is_empty());
    peer.tell(
        &b(),
        &Told {
            topics: &[("T", 6, Some(6))],
            ..PART
        },
    );
    assert_eq!(peer.ask(&third), ["T"], "marked on both");
}

#[test]
fn an_apache_broker_that_has_the_topic_too_does_not_stop_the_offer() {
    let mut peer = both();
    let apache = Broker::master("broker-c", "10.0.0.3:10911", 3);
    let got = peer.register(&apache, 1, &[("T", 6), ("TBW102", 7)]);
    assert!(
        !got.ext.contains_key(offer::OFFER_FIELD),
        "it gets no words it does not know"
    );
    peer.tell(
        &a(),
        &Told {
            topics: &[("T", 6, Some(5))],
            ..PART
        },
    );
    assert_eq!(peer.ask(&b()), ["T"]);
}

#[test]
fn only_writeable_topics_of_the_same_cluster_are_offered_and_only_on_asking() {
    let mut peer = both();
    peer.tell(
        &a(),
        &Told {
            topics: &[("T", 4, Some(5))],
            ..PART
        },
    );
    assert!(peer.ask(&b()).is_empty(), "broker-a takes no messages now");
    peer.tell(
        &a(),
        &Told {
            topics: &[("T", 6, Some(5))],
            ..PART
        },
    );
    let silent = Told {
        asks: false,
        ..WHOLE
    };
    assert!(peer.tell(&b(), &silent).is_empty());
    assert!(
        peer.server
            .table
            .offers_for("other", "broker-b", true)
            .is_empty()
    );
}

#[test]
fn a_deleted_topic_is_offered_to_nobody_from_the_first_broker_on() {
    let mut peer = both();
    let third = Broker::master("broker-c", "10.0.0.3:10911", 3);
    let has = [("T", 6, Some(5))];
    peer.tell(
        &a(),
        &Told {
            topics: &has,
            ..PART
        },
    );
    let gone = Told {
        gone: "T,unknown",
        ..PART
    };
    peer.tell(&a(), &gone);
    assert!(
        peer.tell(&third, &WHOLE).is_empty(),
        "deleted on its only broker"
    );
    assert!(
        peer.has("T"),
        "its route stays until the name server is told"
    );
    peer.tell(
        &b(),
        &Told {
            topics: &has,
            ..PART
        },
    );
    let fields = [("topic", "T"), ("clusterName", "DefaultCluster")];
    assert_eq!(peer.call(request::DELETE_TOPIC_IN_NAMESRV, &fields).code, 0);
    assert!(peer.tell(&third, &WHOLE).is_empty());
    assert!(peer.tell(&a(), &WHOLE).is_empty());
    peer.tell(
        &a(),
        &Told {
            topics: &[("T", 6, Some(9))],
            ..PART
        },
    );
    assert_eq!(peer.ask(&b()), ["T"], "made again, offered again");
}

#[test]
fn marks_go_with_their_broker() {
    let mut peer = both();
    peer.tell(
        &a(),
        &Told {
            topics: &[("T", 6, Some(5))],
            ..PART
        },
    );
    peer.server.connection_closed(0, a().connection);
    assert!(peer.ask(&b()).is_empty());
    peer.tell(
        &a(),
        &Told {
            topics: &[("T", 6, Some(5))],
            ..WHOLE
        },
    );
    assert_eq!(peer.ask(&b()), ["T"]);
}

#[test]
fn many_topics_come_in_lots_that_fit_an_answer() {
    let mut peer = both();
    let names: Vec<String> = (0..1_234)
        .map(|number| format!("made_{number:04}"))
        .collect();
    let topics: Vec<(&str, i32, Option<i64>)> = names
        .iter()
        .map(|name| (name.as_str(), 6, Some(5)))
        .collect();
    peer.tell(
        &a(),
        &Told {
            topics: &topics,
            ..WHOLE
        },
    );
    let mut got = Vec::new();
    let mut lots = 0;
    loop {
        let lot = peer.ask(&b());
        assert!(lot.len() <= offer::OFFER_TOPICS_MAX);
        if lot.is_empty() {
            break;
        }
        lots += 1;
        got.extend(lot);
    }
    assert_eq!(got, names);
    assert!(lots >= 3);
}

#[test]
fn a_part_with_a_repeated_version_takes_nothing_away() {
    let config = NameServerConfig {
        delete_topic_with_broker_registration: true,
        ..NameServerConfig::default()
    };
    let mut peer = Peer::new(config);
    let two = [("T", 6, None), ("U", 6, None)];
    peer.tell(
        &a(),
        &Told {
            topics: &two,
            ..WHOLE
        },
    );
    peer.now_ms -= 1;
    peer.tell(
        &a(),
        &Told {
            topics: &[("V", 6, None)],
            ..PART
        },
    );
    assert!(peer.has("T") && peer.has("U") && peer.has("V"));
    peer.tell(
        &a(),
        &Told {
            topics: &two,
            ..WHOLE
        },
    );
    assert!(!peer.has("V"), "a whole table does");
}
