import sys,time,torch,os
sys.path.insert(0,'.')
from bench.serving.engine import smollm2
from equipoise.serve.source import open_model
from equipoise.serve.generate import build_decoder
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.nano.measure import measure_nano, _Probe
from equipoise.serve.nano.choice import *
from equipoise.serve.nano.lanes import Lanes
torch.set_num_threads(2)
tr=open_model(smollm2())
E=((1,1.0),)
for dt in (torch.bfloat16, torch.float32):
    for inv in (False,True):
        d=build_decoder(tr,dt)
        pool=KvPool(d.model,pages=1600,page_tokens=16,dtype=dt,device=torch.device('cpu'))
        p=PagedDecoder(d,pool,is_invariant=inv)
        lanes=Lanes(2)
        pr=_Probe(p,lanes)
        c=pr.costs()
        print(dt,inv,os.getloadavg()[0],[(a,b,round(x,2)) for a,b,x in c.beside], "dense256", [round(dict(x.dense)[256]*1e6) for x in (c.both,c.one)])
        for kind in KINDS:
            ch=pr.iteration(kind)
            o=NanoChoice(6,c).choose(ch)
            g=pr.compare(kind,o,ch,6)
            # forced: lanes cost nothing
            c2=NanoCosts(LaneCosts(E,E,E),LaneCosts(E,E,E),())
            o2=NanoChoice(6,c2).choose(ch)
            g2=pr.compare(kind,o2,ch,6)
            print("  ",kind,"pred",round(o.gain,3),"meas",round(g.measured,3),"forced two lanes",round(g2.measured,3),g2.is_equal)
        lanes.close()
