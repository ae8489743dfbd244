"""A log that an earlier release wrote: the names of its records on disk stay."""

import base64
import zlib

from adam_async.controller.consensus import recover
from adam_async.controller.contents import log_problem
from adam_async.controller.replicated_state import ReplicatedState
from adam_async.driver.training_rules import PROGRAM_KINDS

LOG = (
    "c-rk(y^kA36yFUI1QR|AB>Gk8?sT@3=oBN72s#8blu=lXcb@Il&F-vbW^*x7q(Bl7K|%MC^d`3-"
    "KKqCQ0)e18IY)sa(Ljk1h=!8?0N%{3eNG4kDG&u$tmnOXAHR8DGdF(u)yB6qXZH8~dtaS+?xiN%d?!==1hO_4@y!Ts1w2-"
    "QGX`R@u|zJJ&7w^h<0?}iA~!qB73^Ly8$%hBME1DK!<fRk!&ah<AZmk<8|(L3Tg#;)3cjhmv00MEuHb2MwLFWGA&+Z$%qhq#"
    "1r;H(u4SkO6;TpO1xUHgctBWdX{j*|<A8{mDAaU|HgvdvwTz+gom>E+{Xxc{qb5a%gbe7Q6p*kmAb)HpM5s`!IYq)q0MyCCx"
    "Wg}&L65{;pl(5lB8znkAk)M{xX(ozFE;)mhPQW=AYtr>5$S@YQ$&whM2-"
    "IrqC;6CrxCiD$bSpXEJu$ISGichnyN4qmV5{tUl<%q$C{0L<LHTF$C}4a9B(c!Hy@15`75$V??qPILW3XP45>X}Rln08?1oO"
    "*{mFSDkFeHRMpDI1KFzA6M2DH?AOy$5q}>Q&H5p+FVu{EjIml%A77X%$1U)c1xlBUF1_dNM=*a`a3aE5PGo;eZ5NbR`01CHQ"
    ")+3A?<y%I}?+6lT!Mi7av!h{T`66X7Gnh%nSJz6_(_xd&ZCeq30>U?aTpK4?C)M_38`m8cc6-"
    "VxB?#T(?v6gFKc&X|lR>)MiQoYy4&)@$UbkeIW&$V0-"
    "RZO%MqCFYjb@ykRnYc*3IXZQxT7SMJs;3TA48BbR;{%=8A=6l(BEpyWVA{|<l{6F${9+GCPlY43uY%xW+rp%;pESj92?S_y?"
    "gR^%gh26?rV$~>0?~(Il!k9Ll1ttubnc8@wAgIM!L>zbRMiEJdBk!>U=WCi9#KfM+yM}7j!bjKq($@RzWo(kcJqYB`l<-"
    "(w$*~zj#z|wpRcWzYP-W$Sk{PwmZorU{l>nV-+%=1VM@=Fc(BXTd6UXt&&iUWseAo*cHg{oM#-"
    "T#Ab_uS;slmH$mB9oT#JCk8$>M(f8Xa?SjgVH=3^v&3R-"
    "RS)95;eA2`3sa#u^9~3ks%$Ijh9kKq42tXk{#ZzGD=J$u#533kp<UBh~dv##Vd(rZ+r~sS5u-"
    ">$+vWw?5jLLEu;HX%cli056U9(=V3T-"
    "YObEc>njQbEWnLuzUi%A4q5liqwOj5P!9z0l>YLGYVUe;kmWh;1HmU@K+Sr|#VZZ$4j3!R{0gs}Kx2~!cHT=G<D>X0>vbBv`"
    "{IMd6itTu6FYOMJHW0hhUhbm_fr18}7!3rtkQX0L_CGV(+obv;LEFW~^CjB`_O*3J3=O)$KP;tzE55y!-"
    "dPKs|TqIa~xfw1lRy2`39%wI04_K@Zpt~iGYY_t7b7m8D)WvQQc7&JhG*|&8e{@cnE9n2vLw{@@uIc-"
    "#x~t+;zuMfw%yU^Qbk~D?`=k1X<7O%qu{-XBLMq=hjWg_EJ|#}hwQ15EykUD-FKb0YQi*g9_$s86LT8t${Y%pFozn8<T8RUZ"
    "Vr^XBM^n8d^~}QNS>LE$W$yl?C<y`YjEn0V2X55v)CPkwK5##C9p{(okxRe);rZpS-@m$UAGoD1+YsdRck}v_?%t($&EA#-"
    "h4+-y@6ZEP9G=)(f&LWO5YAzDD|DOd(Fl95oc9o>*YXTlZ^6@Wy;ftvs}Osw)2BU)*;{CwS*VDHCeAE))hWEz@`c^&Pq}-"
    "){ymVx8i>u-3`VVjv2#BRt73rIG~%+p;Mr7qt@B<Tfz=Vi1%!+#HIj2#^;&gJ+r*-%hH8^*c5Hqv-"
    "{#mDFzNJK9l|6mcs8r(?84kR8+APB)9&68`yYjA`%J(1tHj>(QrrC#A1@J7"
)
"""A snapshot in the first round-wise epoch of a bsp run, then three commands; base 85 of zlib."""


def test_a_log_of_an_earlier_release_is_read_with_its_names_on_disk():
    data = zlib.decompress(base64.b85decode(LOG))
    saved, end = recover(data, origin="the log")
    assert end == len(data)
    assert log_problem(saved) == ""
    replicated_state = ReplicatedState(PROGRAM_KINDS)
    replicated_state.restore(saved.snapshot.state)
    assert replicated_state.map.epoch.round_groups == 1
    assert replicated_state.map.ledger_record.ledger_replicas == (("data-0", 1),)
    outcomes = [replicated_state.apply(entry.index, entry.command) for entry in saved.entries]
    assert all(outcome.done and not outcome.problem for outcome in outcomes)
    assert replicated_state.map.version == 13
    # The record names no incarnation, so no driver is known to be live.
    assert replicated_state.map.run.incarnation == 0
    assert (replicated_state.map.ledger_record.term, replicated_state.map.ledger_record.ledger_replicas) == (
        2,
        (("data-1", 1),),
    )
